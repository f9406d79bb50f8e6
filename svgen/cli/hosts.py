"""Several processes that make one video together: how they meet, and how one that dies is noticed.

    host 0: svgen generate ... --coordinator 10.0.0.2:8476 --num-processes 2 --process-id 0
    host 1: svgen generate ... --coordinator 10.0.0.2:8476 --num-processes 2 --process-id 1

On the hosts of a TPU pod the three flags are not needed. Process 0 alone prints and writes. A peer
that dies would leave the others waiting for it in the middle of a step, so a thread watches them.
"""

import ctypes
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from svgen.cli.options import rare_option
from svgen.errors import MachineError, UsageError

FLAGS = ("coordinator", "num_processes", "process_id")
MEET_S = 120  # how long the first waits for the last
HEARTBEAT_S = 20  # a process that is silent for so long is dead
POLL_S = 1.0
POD = "TPU_WORKER_HOSTNAMES"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """Who takes part. `coordinator` is None where the machine knows better than we do."""

    coordinator: str | None
    count: int
    index: int


def hosts_options(body: Callable) -> Callable:
    """Add the flags by which processes on several hosts find each other."""
    for option in (
        rare_option("--process-id", type=int, metavar="I", help="This one of them, from 0."),
        rare_option("--num-processes", type=int, metavar="N", help="How many make one video."),
        rare_option("--coordinator", metavar="HOST:PORT", help="Where process 0 listens."),
    ):
        body = option(body)
    return body


def hosts_of(options: Mapping[str, Any]) -> Hosts | None:
    """Who takes part, by the flags or by the environment of a TPU pod; None for one process alone.

    Raises UsageError (E_USAGE) for flags that do not fit together.
    """
    given = {name: options.get(name) for name in FLAGS}
    if all(value is None for value in given.values()):
        return Hosts(coordinator=None, count=0, index=0) if _is_pod() else None
    address, count, index = given.values()
    right = (
        address is not None
        and re.fullmatch(r"\S+:[0-9]{1,5}", address)
        and (count or 0) >= 1
        and index is not None
        and 0 <= index < count
    )
    if right:
        return Hosts(coordinator=address, count=count, index=index)
    shown = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())
    raise UsageError(
        "E_USAGE",
        f"{shown} do not fit together",
        why="all three are needed: HOST:PORT, how many processes there are, which one this is",
        hint="--coordinator 10.0.0.2:8476 --num-processes 2 --process-id 0",
    )


def _is_pod() -> bool:
    return "," in os.environ.get(POD, "")


def meet(jax: Any, hosts: Hosts, give_up: Callable[[MachineError], None]) -> None:
    """Wait for the others. Call it before JAX has a device.

    If one does not come, `give_up` gets the error (E_PEER) in another thread and must end the
    process: JAX itself would abort it. Raises that error for an address that cannot be used.
    """
    _keep_stdout()
    _delay_abort()
    jax.config.update("jax_enable_recoverability", True)  # a dead peer does not end this process
    options = {"initialization_timeout": 10 * MEET_S, "heartbeat_timeout_seconds": HEARTBEAT_S}
    if hosts.coordinator is not None:
        options |= {
            "coordinator_address": hosts.coordinator,
            "num_processes": hosts.count,
            "process_id": hosts.index,
        }
    late = threading.Timer(MEET_S, lambda: give_up(_nobody(f"{MEET_S} s have passed")))
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(**options)
    except (RuntimeError, ValueError) as error:
        line = str(error).strip().splitlines()[0][:300] if str(error).strip() else "no reason"
        raise _nobody(line) from error
    finally:
        late.cancel()


def _nobody(why: str) -> MachineError:
    return MachineError(
        "E_PEER",
        "the processes of this run did not come together",
        why=why,
        hint="start the same command on every host, each with its own --process-id, and check that "
        "they reach the coordinator's port",
    )


def _keep_stdout() -> None:
    """Send what native libraries print (Gloo: who is connected) to stderr: stdout is the result."""
    if sys.stdout is None or sys.stdout.fileno() != 1:
        return
    sys.stdout.flush()
    kept = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    os.dup2(2, 1)
    sys.stdout = kept


def _delay_abort() -> None:
    """Let a thread that aborts the process sleep first, for as many seconds as SIGABRT's number: 6.

    JAX aborts when process 0 dies, whatever its settings, from a thread of its own. In these
    seconds the watch, or the step that waits in vain, saves the state and ends the process.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def shared_seed(drawn: int) -> int:
    """The seed that process 0 has drawn."""
    import numpy as np
    from jax.experimental.multihost_utils import broadcast_one_to_all

    return int(broadcast_one_to_all(np.uint32(drawn)))


def shared_state(own: Mapping[str, Any] | None, shape: tuple[int, ...]) -> dict[str, Any] | None:
    """The state that process 0 has on its disk, on every process; None if it has none."""
    import numpy as np
    from jax.experimental.multihost_utils import broadcast_one_to_all

    from svgen.resume import STATE

    empty = {name: np.zeros(shape, np.float32) for name in STATE}
    found = broadcast_one_to_all(dict(own) if own else empty | {"step": np.zeros((), np.int32)})
    return {name: np.asarray(found[name]) for name in STATE} if int(found["step"]) else None


def shared_latents(own: Any | None, shape: tuple[int, ...]) -> Any | None:
    """The latents that process 0 has on its disk, on every process; None if it has none."""
    import numpy as np
    from jax.experimental.multihost_utils import broadcast_one_to_all

    here = np.zeros(shape, np.float32) if own is None else own
    there, latents = broadcast_one_to_all((np.int32(own is not None), here))
    return np.asarray(latents) if int(there) else None


def lost(why: str = "") -> MachineError:
    """The error for a peer that has died."""
    return MachineError(
        "E_PEER",
        "another process of this run has died, or cannot be reached",
        why=why,
        hint="start the run again on all hosts",
    )


class PeerWatch(threading.Thread):
    """Asks every second whether all processes live, and calls `on_lost` (which should not return)
    when one does not.
    """

    def __init__(self, count: int, on_lost: Callable[[str], None]):
        super().__init__(daemon=True, name="watch")
        self.count, self.on_lost = count, on_lost
        self.ended = threading.Event()

    def run(self) -> None:
        """Watch until `end`."""
        from jax._src.distributed import global_state  # what `multihost_utils.live_devices` asks

        while not self.ended.wait(POLL_S):
            try:
                living = set(global_state.client.get_live_nodes(list(range(self.count))))
            except Exception as error:
                living, why = set(), str(error).strip().splitlines()[0][:300]
            else:
                why = f"{len(living)} of {self.count} processes live"
            if len(living) < self.count and not self.ended.is_set():
                self.on_lost(why)

    def end(self) -> None:
        """Stop watching: the others may leave now."""
        self.ended.set()
