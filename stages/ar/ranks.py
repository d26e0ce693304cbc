"""Tensor parallel: one model on several processes, each with a share of every layer.

    rank 0   Engine --> Leading --its call--> the others --> its own runner
    rank n   follow: a call --> the same runner, with the same result; the shares meet in the model's own collectives

Knows torch.distributed, and what an engine asks of a runner. Knows nothing of sequences.

Calls go over gloo, the shares of a pass over gloo on CPUs and over NCCL on GPUs, where a captured graph has them in it.

Rules
- All ranks make the same calls in the same order. Whoever runs the model's modules on rank 0 alone waits for good.
- A call is a `Call`, as msgpack; nothing is unpickled. Sockets are bound to loopback.
- On a GPU a pass is begun, not done, when `forward` returns, on each rank; what all of them find likeliest is the same, so each takes its own. Rank 0
  waits for its pass before it begins the one after the next, and its passes end only where the others' do, so nobody runs further ahead than it.
- A receive has no end in time, since an idle engine says nothing for days. What dies or hangs is for the runtime to see: it ends all ranks.
- A pass that fails on one rank leaves the others in the middle of it, so it ends the replica.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from stages.ar.runner import Batch, Result, Runner
from streamrt import ConfigError, Context, StageFailed

FOREVER = timedelta(days=3650)


class Allocate(msgspec.Struct, tag=True):
    """The arguments of `Runner.allocate`."""

    blocks: int
    block_size: int


class Check(msgspec.Struct, tag=True):
    """`Runner.check`"""


class Prepare(msgspec.Struct, tag=True):
    """The arguments of `Runner.prepare`."""

    max_tokens: int
    max_sequences: int
    max_context: int


class Forward(msgspec.Struct, tag=True):
    """`Runner.forward`"""

    batch: Batch


class End(msgspec.Struct, tag=True):
    """Rank 0 closes."""


Call = Allocate | Check | Prepare | Forward | End


class Array(msgspec.Struct, array_like=True):
    """A tensor on the CPU, as bytes."""

    dtype: str  # of torch
    shape: tuple[int, ...]
    data: bytes


def join(context: Context) -> None:
    """Find the other ranks. Waits for them; what bounds it is the load timeout.

    Before anything of the model: transformers shards it over the group that is there.
    """
    assert context.rendezvous is not None
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    os.environ["LOCAL_RANK"] = context.device.partition(":")[2] or "0"  # which GPU transformers takes
    backend = "gloo"
    if context.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers would take a GPU where there is one
    else:
        torch.cuda.set_device(context.device)
        backend = "cpu:gloo,cuda:nccl"
    store = dist.FileStore(str(context.rendezvous / "store"), context.ranks)
    dist.init_process_group(backend, store=store, rank=context.rank, world_size=context.ranks, timeout=FOREVER)


def check_shares(config: Any, ranks: int) -> None:
    """Raise ConfigError unless attention's heads can be dealt out evenly. `config`: the decoder's."""
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if heads is not None and heads % ranks:
            what = f"tp: got {ranks}, the model's {name} is {heads}, which {ranks} ranks can not share evenly"
            raise ConfigError(what, hint=f"set tp to a divisor of {heads}", param="tp")


class Leading:
    """Rank 0's runner, as its engine sees it. What a runner calls of itself inside of a call is not told: the others do it too."""

    def __init__(self, runner: Runner, broken: Callable[[str], None]) -> None:
        """`broken` is told when the ranks are out of step, which is for good."""
        self._runner = runner
        self._broken = broken
        self._is_broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def allocate(self, blocks: int, block_size: int) -> None:
        self._call(Allocate(blocks, block_size))

    def check(self) -> None:
        self._call(Check())

    def prepare(self, *, max_tokens: int, max_sequences: int, max_context: int) -> None:
        self._call(Prepare(max_tokens, max_sequences, max_context))

    def forward(self, batch: Batch) -> Result:
        try:
            result: Result = self._call(Forward(batch))
        except Exception as error:  # whatever it was: the others may stand in the middle of this pass
            self._is_broken = True
            reason = "a rank of the model is gone, or its step failed"
            self._broken(reason)  # the host logs what it was
            raise StageFailed(reason, hint="try again in a moment") from error
        return result

    def close(self) -> None:
        """Have the others return from `follow`, unless they can not hear it."""
        if not self._is_broken:
            _tell(End())

    def _call(self, call: Call) -> Any:
        _tell(call)
        return _carry_out(self._runner, call)


def follow(runner: Runner) -> None:
    """On the other ranks: make the calls of rank 0, until it closes."""
    while not isinstance(call := _hear(), End):
        _carry_out(runner, call)


def _carry_out(runner: Runner, call: Call) -> Any:
    match call:
        case Allocate(blocks, block_size):
            return runner.allocate(blocks, block_size)
        case Check():
            return runner.check()
        case Prepare(max_tokens, max_sequences, max_context):
            return runner.prepare(max_tokens=max_tokens, max_sequences=max_sequences, max_context=max_context)
        case Forward(batch):
            return runner.forward(batch)


# ---- a call on the wire: its length, then its bytes ----------------------------------------------------------------------------


def _tell(call: Call) -> None:
    body = bytearray(encode(call))
    dist.broadcast(torch.tensor([len(body)]), 0)
    dist.broadcast(torch.frombuffer(body, dtype=torch.uint8), 0)


def _hear() -> Call:
    length = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(length, 0)
    body = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(body, 0)
    return decode(body.numpy())


def _to_array(tensor: Any) -> Array:
    if not isinstance(tensor, torch.Tensor):
        raise NotImplementedError(f"no call has a {type(tensor).__name__}")
    data = tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
    return Array(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data.numpy().tobytes())


def _to_tensor(_: type, value: Any) -> torch.Tensor:
    array = msgspec.convert(value, Array)
    dtype = getattr(torch, array.dtype)
    if not array.data:
        return torch.empty(array.shape, dtype=dtype)
    return torch.frombuffer(bytearray(array.data), dtype=dtype).view(array.shape)


encode = msgspec.msgpack.Encoder(enc_hook=_to_array).encode
decode = msgspec.msgpack.Decoder(Call, dec_hook=_to_tensor).decode
