"""Device memory between the stages of one GPU, for stages that use it: the producer's pool and the consumer's reader.

`stages/tensors.py` joins them to torch. Importing this loads no driver. What must hold is said in `transport/cuda_ipc.py`.
"""

from transport.chunk import CARRIED_DTYPES, DEVICE_DTYPE
from transport.cuda_ipc import CudaPool, CudaReader, Loan, View
from transport.errors import DeviceError, TooLarge, WouldBlock

__all__ = ["CARRIED_DTYPES", "DEVICE_DTYPE", "CudaPool", "CudaReader", "DeviceError", "Loan", "TooLarge", "View", "WouldBlock"]
