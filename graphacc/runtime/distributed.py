"""Several processes that train one model: who they are, how JAX connects them, and which of them watch each other.

Every process runs the same script, and owns a group of the devices: ``devices=8`` in two processes is four each. How many
processes there are is read from what started them: torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK), SLURM's srun,
or GRAPHACC_COORDINATOR, GRAPHACC_NUM_PROCESSES and GRAPHACC_PROCESS_ID. JAX's distributed service joins them; on CPU the
collectives run over Gloo. A process that dies stops the others (see `graphacc.runtime.watchdog`).
"""

import dataclasses
import os
import re
import socket
from collections.abc import Callable, Mapping

import jax
from torch.distributed import TCPStore

from graphacc._compat.jax_ import (
    DistributedService,
    KeyNotThere,
    backend_started,
    can_join_processes,
    distributed_service,
    read_key,
    slurm_step,
)
from graphacc.errors import DistributedError
from graphacc.runtime import agreement
from graphacc.runtime.watchdog import DEFAULT_TIMEOUT, Watchdog

CONNECT_SECONDS = 300
"""How long a process waits for the others to start."""

WAIT_TIMEOUTS = 10
"""How many timeouts a process waits for the others before a new program."""

_watchdog: Watchdog | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The processes of a run, as this one sees them."""

    coordinator: str  # "host:port" of process 0's service, where it is known already
    num_processes: int
    process_id: int
    source: str  # who said so: "torchrun", "SLURM", "GRAPHACC_COORDINATOR" or "arguments"
    local_id: int = 0  # of this process on its machine
    num_local: int = 1  # processes on this machine
    store: str = ""  # "host:port" of torchrun's key-value store, which then tells the coordinator's address


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float | None = None,
) -> bool:
    """Join the processes of this run; `graphacc.compile` calls it where the environment names several.

    Call it before JAX is first used, in every process. A second call does nothing.

    Args:
        coordinator: "host:port" where process 0 listens and all others reach it; default: from the environment.
        num_processes: how many there are; default: from the environment.
        process_id: of this process, from 0; default: from the environment.
        timeout: seconds after which a process that is no longer heard of counts as dead (default: GRAPHACC_TIMEOUT, else 30).
            A process that ends is noticed at once; this is for machines and networks that fail.

    Returns:
        Whether there are several processes.

    Raises:
        DistributedError: the environment contradicts itself, or JAX was used before.
    """
    global _watchdog
    if _watchdog is not None:
        return True
    seconds = _timeout(timeout)
    if not jax.distributed.is_initialized():
        cluster = detect(os.environ, coordinator, num_processes, process_id)
        if cluster is None:
            return False
        if not can_join_processes():
            raise DistributedError(
                f"{cluster.source} says that this is process {cluster.process_id} of {cluster.num_processes}, which this version of JAX cannot join: "
                "graphacc doctor says what it lacks; install another version of jax, or unset the variables to run alone"
            )
        if backend_started():
            raise DistributedError(
                f"{cluster.source} says that this is process {cluster.process_id} of {cluster.num_processes}, but JAX was used before they "
                "were joined, and would train alone: call graphacc.distributed.initialize() (or graphacc.compile) before the first use of "
                "jax, or unset the variables to run alone"
            )
        _connect(cluster, seconds)
    service = distributed_service()
    if service.num_processes > 1:
        _watchdog = Watchdog.start(service, seconds)
    return service.num_processes > 1


def process_index() -> int:
    """The number of this process, from 0; does not start JAX's devices."""
    return distributed_service().process_id if jax.distributed.is_initialized() else 0


def process_count() -> int:
    """The number of processes; does not start JAX's devices."""
    return distributed_service().num_processes if jax.distributed.is_initialized() else 1


def is_first_process() -> bool:
    """Whether this is the process that should print and write for all: process 0, or the only one."""
    return process_index() == 0


def note(action: str) -> None:
    """Log an action that all processes of the run take part in, before it is started (see `graphacc.runtime.agreement`)."""
    if _watchdog is not None:
        _watchdog.note(action)


def agree(label: str, description: agreement.Description) -> int:
    """Wait until all processes of the run are about to compile the same program.

    Args:
        label: of the program, for one line.
        description: all that must be the same.

    Returns:
        A number for `meet`.

    Raises:
        DistributedError: they are not; says which process differs and in what.
    """
    if _watchdog is None:
        return 0
    number = _watchdog.note(f"{agreement.COMPILES}{label}")
    _watchdog.report()
    agreement.agree(distributed_service(), number, description, _watchdog.timeout, WAIT_TIMEOUTS * _watchdog.timeout)
    return number


def meet(number: int) -> None:
    """Wait until all processes of the run have compiled the program that they agreed on."""
    if _watchdog is not None:
        agreement.meet(distributed_service(), number, _watchdog.timeout)


def share(make: Callable[[], str]) -> str:
    """What process 0 makes, in every process of the run; all must call this in the same order."""
    if _watchdog is None:
        return make()
    return agreement.share(distributed_service(), _watchdog.note("shares a choice of process 0"), make, _watchdog.timeout)


def tell_all(name: str, text: str) -> list[str]:
    """What every process of the run says under a name that is used once, in their order; waits for all. Any thread may call it, as no device takes part."""
    service = distributed_service()
    service.client.key_value_set(f"graphacc/told/{name}/{service.process_id}", f"={text}")
    return [_heard(service, f"graphacc/told/{name}/{rank}") for rank in range(service.num_processes)]


def _heard(service: DistributedService, key: str) -> str:
    while True:
        try:
            return read_key(service, key, 10)[1:]
        except KeyNotThere:
            continue  # a process that has died is the watchdog's


def detect(
    environ: Mapping[str, str], coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> Cluster | None:
    """The processes that arguments and environment describe; None for one alone.

    Raises:
        DistributedError: something is missing or out of range; names the variable.
    """
    found = _torchrun(environ) or _slurm(environ) or Cluster(coordinator="", num_processes=1, process_id=0, source="")
    address = coordinator or environ.get("GRAPHACC_COORDINATOR", "")
    if address or num_processes is not None or process_id is not None:
        found = dataclasses.replace(
            found,
            coordinator=address or found.coordinator,
            store="" if address else found.store,
            num_processes=_number(environ, "GRAPHACC_NUM_PROCESSES", num_processes, found.num_processes if found.source else None),
            process_id=_number(environ, "GRAPHACC_PROCESS_ID", process_id, found.process_id if found.source else None),
            source="arguments" if coordinator or num_processes is not None else "GRAPHACC_COORDINATOR",
        )
    if not found.source or found.num_processes == 1:
        return None
    _check(found)
    return found


def _number(environ: Mapping[str, str], name: str, argument: int | None, known: int | None = None) -> int:
    if argument is not None:
        return argument
    text = environ.get(name)
    if text is None and known is not None:
        return known
    if text is None or not text.strip().isdecimal():
        state = "is not set" if text is None else f"is {text!r}, which is no number"
        raise DistributedError(f"several processes are asked for, but {name} {state}: set it in every process, or give the argument")
    return int(text)


def _check(cluster: Cluster) -> None:
    if not 0 <= cluster.process_id < cluster.num_processes:
        raise DistributedError(
            f"{cluster.source}: process {cluster.process_id} of {cluster.num_processes}: processes are numbered from 0 to "
            f"{cluster.num_processes - 1}"
        )
    for address in filter(None, (cluster.coordinator, cluster.store)):
        if not re.fullmatch(r".+:\d+", address):
            raise DistributedError(f'{cluster.source}: the address {address!r} is not of the form "host:port", such as "10.0.0.1:29400"')
    if not cluster.coordinator and not cluster.store:
        raise DistributedError(f"{cluster.source}: no address of process 0: set GRAPHACC_COORDINATOR=host:port in every process")


def _torchrun(environ: Mapping[str, str]) -> Cluster | None:
    """torchrun's variables. Its agent listens on MASTER_PORT itself, and keeps a store there by which process 0 tells its own port."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    address = f"{host}:{port}" if host and port else ""
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Cluster(
        coordinator="" if agent else address,
        num_processes=_number(environ, "WORLD_SIZE", None),
        process_id=_number(environ, "RANK", None),
        source="torchrun",
        local_id=_number(environ, "LOCAL_RANK", None, 0),
        num_local=_number(environ, "LOCAL_WORLD_SIZE", None, 1),
        store=address if agent else "",
    )


def _slurm(environ: Mapping[str, str]) -> Cluster | None:
    """SLURM's variables inside srun. The address is of the step's first node, or MASTER_ADDR and MASTER_PORT where a script sets them."""
    step = slurm_step() if "SLURM_STEP_NODELIST" in environ else None
    if step is None:
        return None
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    per_node = [int(number) for number in re.findall(r"(\d+)(?:\(x\d+\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))]
    return Cluster(
        coordinator=f"{host}:{port}" if host and port else step.coordinator,
        num_processes=step.num_processes,
        process_id=step.process_id,
        source="SLURM",
        local_id=step.local_id,
        num_local=max(per_node),
    )


def _connect(cluster: Cluster, timeout: float) -> None:
    """Set JAX up for this process's part of the devices, and wait for the other processes."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        cluster.coordinator or _agreed_address(cluster),
        cluster.num_processes,
        cluster.process_id,
        local_device_ids=_own_gpus(cluster, os.environ),
        cluster_detection_method="deactivate",
        initialization_timeout=CONNECT_SECONDS,
        heartbeat_timeout_seconds=max(10, round(2 * timeout)),  # the watchdog comes first, with a better message
    )


def _agreed_address(cluster: Cluster) -> str:
    """A free port of process 0, told to the others by torchrun's store."""
    host, _, port = cluster.store.rpartition(":")
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    key = f"graphacc/coordinator/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if cluster.process_id == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            free = probe.getsockname()[1]
        store.set(key, f"{host if cluster.num_local == cluster.num_processes else socket.gethostname()}:{free}")
    return store.get(key).decode()


def _own_gpus(cluster: Cluster, environ: Mapping[str, str]) -> list[int] | None:
    """One GPU for each process where they share a machine; None (all visible ones) where the launcher has chosen already."""
    visible = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    shared = cluster.num_local > 1 and (not visible or len(visible) == cluster.num_local)
    return [cluster.local_id] if shared else None


def _timeout(given: float | None) -> float:
    text = os.environ.get("GRAPHACC_TIMEOUT", str(DEFAULT_TIMEOUT)) if given is None else str(given)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < 86400:
        raise DistributedError(f"timeout (GRAPHACC_TIMEOUT) is {text!r}: give seconds, from 1 to 86400")
    return seconds
