"""The processes of one launch, as they find each other without a process group.

Preparing data takes hours, and a collective that waits so long ends in a timeout (10 minutes with
NCCL, 30 with gloo). So processes meet at the launcher's key-value store (torch.distributed's
TCPStore), where waiting costs nothing, and form their group once the data is ready. Each counts up
a number there every few seconds: who waits for one that died, on whatever node, stops within a
minute and says so.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env
from torch import Tensor

from draftsmith.drafters.errors import UserError, said

BEAT = 2.0  # seconds between two signs of life
LOST = 60.0  # seconds without one that mean death
DISK_DELAY = 60.0  # seconds after which a shared disk shows what another node wrote
_POLL = 0.05
_CONNECT = timedelta(minutes=5)  # for processes that start later than others

T = TypeVar("T")


class Processes:
    """Process `index` of `count`; `local` is its place on its own node, and so its device's."""

    def __init__(self, index: int = 0, count: int = 1, local: int = 0, store: Any = None) -> None:
        self.index, self.count, self.local = index, count, local
        self._store = store
        self._meetings = 0

    @property
    def main(self) -> bool:
        """Whether it is the one that claims folders, and writes what all of them share."""
        return self.index == 0

    @property
    def device(self) -> torch.device:
        """Where it computes, as accelerate will choose. UserError where it has no device."""
        if parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available():
            return torch.device("cpu")
        kind = str(torch.accelerator.current_accelerator())
        if self.count == 1:
            return torch.device(kind)
        if self.local >= torch.accelerator.device_count():
            raise UserError(
                f"process {self.index}: this node has {torch.accelerator.device_count()} devices "
                f"for more processes; start as many as there are devices"
            )
        return torch.device(kind, self.local)

    def share(self, items: Sequence[T]) -> list[T]:
        """Its own of what all of them hold, every `count`-th."""
        return list(items[self.index :: self.count])

    def meet(self) -> None:
        """Waits, without limit, until every process has come here.

        The main process leaves last: its own store may be the one where they meet. Raises UserError
        where a process has died.
        """
        if self.count == 1:
            return
        self._meetings += 1
        try:
            for state in ("came", "left"):
                key = f"{state} {self._meetings}"
                self._store.add(key, 1)
                if state == "came" or self.main:
                    self._wait(key)
        except RuntimeError:  # the store's own process is gone, and with it its node's launcher
            raise _lost(self.index, "the launcher, or the main process,") from None

    def _wait(self, key: str) -> None:
        seen: dict[int, tuple[int, float]] = {}  # process: its last sign, and when that was new
        while self._store.add(key, 0) < self.count:
            now = time.monotonic()
            for other in range(self.count):
                beat = self._store.add(f"beat {other}", 0)
                if other not in seen or seen[other][0] != beat:
                    seen[other] = beat, now
                elif now - seen[other][1] > LOST:
                    raise _lost(self.index, f"process {other}")
            time.sleep(_POLL)

    def wait_for(self, path: Path) -> None:
        """Waits for a file that the main process wrote before they met.

        Raises UserError where it does not appear: then nodes do not share that disk.
        """
        deadline = time.monotonic() + DISK_DELAY
        while not path.exists():
            if time.monotonic() > deadline:
                raise UserError(
                    f"{path}: was written by the main process, and process {self.index} does not "
                    "see it; put it on a disk that all nodes share"
                )
            time.sleep(_POLL)

    def beat(self, over: threading.Event) -> None:
        """Shows the others that this process lives, until `over` is set."""
        while not over.wait(BEAT):
            try:
                self._store.add(f"beat {self.index}", 1)
            except RuntimeError:  # the next meeting says so
                return


SINGLE = Processes()


@contextmanager
def launched() -> Iterator[Processes]:
    """The processes that a launcher (accelerate launch, torchrun) started, this one among them.

    Raises UserError where they cannot reach each other.
    """
    count = int(os.environ.get("WORLD_SIZE", 1))
    if count == 1:
        yield SINGLE
        return
    try:
        store, index, _ = next(torch.distributed.rendezvous("env://", timeout=_CONNECT))
    except (RuntimeError, ValueError) as error:
        raise UserError(f"launch: the {count} processes cannot meet ({said(error)})") from None
    own = torch.distributed.PrefixStore("draftsmith", store)
    processes = Processes(index, count, int(os.environ.get("LOCAL_RANK", index)), own)
    over = threading.Event()
    thread = threading.Thread(target=processes.beat, args=(over,), daemon=True)
    thread.start()
    try:
        yield processes
    finally:
        over.set()
        thread.join(2 * BEAT)  # the store may be gone


def check_device_map(device_map: Any) -> None:
    """Raises UserError where several processes would each spread the target over one node."""
    count = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1)))
    if device_map and count > 1:
        raise UserError(
            f"device_map: spreads the target over a node's devices, and {count} processes would "
            "each take all of them; start one process a node"
        )


def summed(accelerator: Accelerator, tensor: Tensor) -> Tensor:
    """The sum over all processes, for each of them. Raises UserError where one has died."""
    if accelerator.num_processes == 1:
        return tensor
    try:
        return accelerator.reduce(tensor, reduction="sum")
    except RuntimeError as error:
        # NCCL's have a class of their own, gloo's only a word: out of memory is neither.
        if not isinstance(error, torch.distributed.DistError) and "gloo" not in str(error):
            raise
        raise _lost(accelerator.process_index, "another process") from None


def check_alike(accelerator: Accelerator, numbers: Sequence[int], folder: Path) -> None:
    """Raises UserError unless all processes begin alike: on a disk that nodes do not share, one
    would go on with a run and the other begin it anew. numbers: equal where they do."""
    mine = torch.tensor(numbers, device=accelerator.device)
    other = summed(accelerator, mine) != accelerator.num_processes * mine
    if on_any(accelerator, bool(other.any())):  # all raise, or some would wait for the others
        raise UserError(
            f"{folder}: processes begin with different steps, samples or weights; "
            "put runs, samples and start on a disk that all nodes share"
        )


def on_any(accelerator: Accelerator, own: bool) -> bool:
    """Whether it holds on any process: all must leave a loop together."""
    if accelerator.num_processes == 1:
        return own
    flag = torch.tensor([float(own)], device=accelerator.device)
    return bool(summed(accelerator, flag).item())


def _lost(index: int, who: str) -> UserError:
    return UserError(
        f"process {index}: {who} of this launch has ended; what it said tells why. The same "
        "command goes on from what is stored"
    )
