"""Device memory between the stages of one GPU, and on its way to the host, for stages that use it.

`stages/tensors.py` joins them to torch. Importing this loads no driver. What must hold is said in `transport/cuda_ipc.py` and
`transport/cuda_host.py`.
"""

from transport.chunk import CARRIED_DTYPES, DEVICE_DTYPE
from transport.cuda_host import HostCopies
from transport.cuda_ipc import CudaPool, CudaReader, Loan, View
from transport.errors import DeviceError, TooLarge, WouldBlock

__all__ = [
    "CARRIED_DTYPES",
    "DEVICE_DTYPE",
    "CudaPool",
    "CudaReader",
    "DeviceError",
    "HostCopies",
    "Loan",
    "TooLarge",
    "View",
    "WouldBlock",
]
