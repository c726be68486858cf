"""What the processes of the tests run: ``python job.py <task> [arguments] [+ <task> ...]``."""

import json
import os
import sys
from collections.abc import Iterator

import torch

import graphacc

torch.set_num_threads(1)
BATCH, LENGTH, VOCABULARY = 8, 16, 64


def model(layers: int = 1) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel  # some seconds, which not every task needs

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=layers,
        n_head=4,
        resid_pdrop=0.1,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def compiled(strategy: str, layers: int = 1, **options):
    options = dict(cache_dir=None, fast_compile=True, memory_plan="xla") | options
    net = graphacc.compile(model(layers), strategy=strategy, **options)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-3)


def batch(step: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def step(net, optimizer, number: int, part: slice = slice(None)) -> torch.Tensor:
    rows = batch(number)[part]
    loss = net(input_ids=rows, labels=rows).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def five_losses(net, optimizer) -> list[float]:
    """Of the first five steps with `losses`' model."""
    from training import captured_once  # imports transformers

    with captured_once("losses"):
        return [step(net, optimizer, number).item() for number in range(5)]


def losses(*strategies: str) -> dict:
    """Five steps under each strategy: losses, and the sum of the absolute values of the parameters then."""
    found = {}
    for strategy in strategies:
        net, optimizer = compiled(strategy, 2)
        values = five_losses(net, optimizer)
        found[strategy] = {"losses": values, "parameters": float(sum(p.detach().double().abs().sum() for p in net.parameters()))}
    return found


def searched(strategy: str) -> dict:
    """Five steps under a strategy that process 0 searches."""
    net, optimizer = compiled(strategy, 2, devices=8)
    values = five_losses(net, optimizer)
    return {"losses": values, "strategy": str(net.plan.strategy), "rivals": len(net.plan.rivals)}


def refused(strategy: str) -> str:
    """Why process 0 finds no strategy, in every process."""
    net, optimizer = compiled(strategy, 2, devices=8)
    try:
        step(net, optimizer, 0)
    except graphacc.StrategyError as error:
        return str(error)
    return "found one"


def losses_of_parts(*strategies: str) -> dict:
    """Where each process passes its own rows: losses, and a sum of the logits that depends on the order of the rows."""
    graphacc.distributed.initialize()
    rows = BATCH // graphacc.distributed.process_count()
    first = rows * graphacc.distributed.process_index()
    part, weights, found = slice(first, first + rows), torch.linspace(0, 1, BATCH).double()[:, None, None], {}
    for strategy in strategies:
        net, optimizer = compiled(strategy, batch="local")
        values = [step(net, optimizer, number, part).item() for number in range(3)]
        net.eval()
        with torch.no_grad():
            logits = net(input_ids=batch(3)[part]).logits.double()
        found[strategy] = {"losses": values, "logits": (logits.abs() * weights).sum().item()}
    return found


class WithTable(torch.nn.Linear):
    """Holds a tensor that is no buffer, and has as many rows as a process has examples."""

    def __init__(self):
        super().__init__(6, 8)
        self.table = torch.linspace(-1, 1, 32).view(4, 8)

    def forward(self, x):
        out = super().forward(x)
        return out + torch.cdist(out, self.table).sum(1, keepdim=True)


def losses_with_tables() -> dict:
    """Where each process passes its own rows, and tables that have as many rows as a part of the batch, and as all of it, and are whole in every process."""
    graphacc.distributed.initialize()
    torch.manual_seed(0)
    rows = BATCH // graphacc.distributed.process_count()
    part = slice(rows * graphacc.distributed.process_index(), rows * (1 + graphacc.distributed.process_index()))
    net = graphacc.compile(WithTable(), strategy="dp=2,fsdp=4", batch="local", cache_dir=None, fast_compile=True, memory_plan="xla")
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.01), []
    for number in range(3):
        x = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(number))
        out = net(x[part])
        loss = torch.nn.functional.cross_entropy(out, torch.arange(BATCH)[part])
        for count in (4, BATCH):
            loss = loss + torch.cdist(out, torch.linspace(-1, 2, count * 8).view(count, 8)).amin(1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "by_pytorch": list(net._graphacc_engine.by_pytorch.counts)}


def small_steps() -> Iterator[int]:
    """Train a layer whose weight the processes share; the number of every step that has ended."""
    torch.manual_seed(0)
    net = graphacc.compile(torch.nn.Linear(16, 16), strategy="fsdp=8", cache_dir=None, fast_compile=True, memory_plan="xla")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in range(100_000):
        loss = net(torch.ones(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        yield number


def endless(directory: str) -> None:
    """Train until the end of the world, or of another process; a file per process says that it has begun."""
    for number in small_steps():
        if number == 1:
            open(os.path.join(directory, f"{graphacc.distributed.process_index()}"), "w").close()


def strangers(seconds: str) -> dict:
    """Others connect to the watchdog of process 0 while both train on; which of them was told something, and what the watch knows afterwards."""
    import socket
    import threading
    import time

    from graphacc.runtime import distributed

    steps = small_steps()
    next(steps)
    watchdog = distributed._watchdog
    places = [listener.getsockname()[:2] for listener in watchdog._listeners]
    sent, told, elsewhere = [], [], []
    for address, port in places:
        for data in STRAYS:
            sent.append(socket.create_connection((address, port), timeout=float(seconds)))
            sent[-1].sendall(data)
        socket.create_connection((address, port)).close()
        for other in ("127.0.0.2", _own_address()):
            with socket.socket() as probe:
                elsewhere.append(probe.connect_ex((other, port)))
    before = {rank: progress.count for rank, progress in watchdog._others.items()}
    for _ in range(FURTHER_STEPS):  # both make as many; longer than the timeout
        time.sleep(float(seconds) / FURTHER_STEPS)
        next(steps)
    for connection in sent:
        try:
            told.append(connection.recv(100).decode())
        except ConnectionResetError:
            told.append("")
        except TimeoutError:
            told.append("still open")
    alive = any(thread.name == "graphacc-watchdog" for thread in threading.enumerate())
    after = {rank: progress.count for rank, progress in watchdog._others.items()}
    return {"places": places, "told": told, "elsewhere": elsewhere, "alive": alive, "goes on": [after[rank] > before[rank] for rank in after]}


FURTHER_STEPS = 10
STRAYS = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff\xfe\x00\n",
    '{"token": "é"}\n'.encode(),
    b'{"token": "\\ud800"}\n',
    b'{"token": 5, "kind": "failed", "text": "x", "remedy": "y"}\n',
    b"[" * 60_000 + b"\n",
    b"[1]\n",
    b"",  # says nothing
    b"{",  # does not end its line
)


def _own_address() -> str:
    """This machine's address on the way to others; nothing is sent."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.3"  # there is no other machine
        return probe.getsockname()[0]


def failing() -> None:
    """Process 1 has an error that nobody catches; process 0 goes on."""
    for number in small_steps():
        if number == 1 and graphacc.distributed.process_index() == 1:
            raise RuntimeError("the data of this process are broken")


def differing(what: str, directory: str = "") -> None:
    """Process 1 does something else than process 0; both are alive. A file of process 1 says that it begins with it."""
    graphacc.distributed.initialize()
    odd = graphacc.distributed.process_index() == 1
    torch.manual_seed(5 if what == "seed" and odd else 3)
    net = graphacc.compile(torch.nn.Linear(4, 4), strategy="fsdp=2", cache_dir=None, fast_compile=True, memory_plan="xla")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rows = torch.zeros(4 if what == "rows" and odd else 8, 4)
    for number in range(7 if what == "steps" and odd else 6):
        if odd and directory and number == {"more": 3, "steps": 6}[what]:
            open(os.path.join(directory, "1"), "w").close()
        if number == 3 and odd and what == "more":
            with torch.no_grad():
                net(rows)
        if number == 4 and odd and what == "exit":
            sys.exit(3)
        loss = net(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()


def pipelines(directory: str, strategy: str, *others: str) -> dict:
    """`losses`; and with the first strategy, losses after a checkpoint, again after it was read back, and evaluated logits."""
    net, optimizer = compiled(strategy, 2)
    trained = five_losses(net, optimizer)
    graphacc.save_checkpoint(directory, net, optimizer)
    after = []
    for _ in range(2):
        after.append(step(net, optimizer, 5).item())
        graphacc.load_checkpoint(directory, net, optimizer)
    net.eval()
    with torch.no_grad():
        logits = net(input_ids=batch(0)[:3]).logits
    parameters = {name: total(value) for name, value in net.state_dict().items()}
    return {"losses": trained, "after": after, "logits": total(logits), "parameters": parameters, "others": losses(*others)}


def total(values: torch.Tensor) -> float:
    """A number that depends on the places of the values."""
    flat = values.detach().double().flatten()
    return (flat.abs() * torch.linspace(1, 2, len(flat)).double()).sum().item()


def save(directory: str, steps: str, resume: str = "", strategy: str = "dp=2,fsdp=4") -> dict:
    """Train, from a checkpoint if there is one, and save."""
    net, optimizer = compiled(strategy)
    done = graphacc.load_checkpoint(resume, net, optimizer)["done"] if resume else 0
    values = [step(net, optimizer, number).item() for number in range(done, done + int(steps))]
    graphacc.save_checkpoint(directory, net, optimizer, extra={"done": done + int(steps)})
    return {"losses": values, "done": done}


def save_on_a_full_disk(directory: str) -> dict:
    """Process 1 cannot write its part; all processes hear of it, and can go on."""
    from graphacc.runtime import checkpoint_files

    torch.manual_seed(3)
    net = graphacc.compile(two_layers(), strategy="fsdp=8", cache_dir=None, fast_compile=True, memory_plan="xla")
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    train_layers(net, optimizer, 1)
    graphacc.save_checkpoint(directory, net, optimizer, extra={"version": 1})
    before, message = checkpoint_files.flush, ""
    if graphacc.distributed.process_index() == 1:
        checkpoint_files.flush = _no_space
    try:
        graphacc.save_checkpoint(directory, net, optimizer, extra={"version": 2})
    except (OSError, graphacc.CheckpointError) as error:
        message = f"{type(error).__name__}: {error}"
    checkpoint_files.flush = before
    kept = graphacc.load_checkpoint(directory, net, optimizer)["version"]
    graphacc.save_checkpoint(directory, net, optimizer, extra={"version": 3})
    return {"message": message, "kept": kept, "losses": train_layers(net, optimizer, 1)}


def made_on_meta(directory: str, *strategies: str) -> list:
    """Models of the meta device that their modules initialise: losses; then a save in the background that fails in process 1, and one that does not."""
    from graphacc.runtime import checkpoint_files

    found = []
    for strategy in strategies:
        torch.manual_seed(3)
        with torch.device("meta"):
            net = two_layers()
        torch.manual_seed(3)
        net = graphacc.compile(net, strategy=strategy, cache_dir=None, fast_compile=True, memory_plan="xla")
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        losses, before = train_layers(net, optimizer, 2), checkpoint_files.flush
        graphacc.save_checkpoint(f"{directory}/{strategy}", net, optimizer, extra={"version": 1})
        if graphacc.distributed.process_index() == 1:
            checkpoint_files.flush = _no_space
        saving, message = graphacc.save_checkpoint(f"{directory}/{strategy}", net, optimizer, extra={"version": 2}, asynchronous=True), ""
        losses += train_layers(net, optimizer, 1)
        try:
            saving.wait()
        except (OSError, graphacc.CheckpointError) as error:
            message = f"{type(error).__name__}: {error}"
        checkpoint_files.flush = before
        kept = graphacc.load_checkpoint(f"{directory}/{strategy}", net, optimizer)["version"]
        graphacc.save_checkpoint(f"{directory}/{strategy}", net, optimizer, extra={"version": 3}, asynchronous=True)
        losses += train_layers(net, optimizer, 2)
        found.append({"losses": losses, "message": message, "kept": kept, "now": graphacc.load_checkpoint(f"{directory}/{strategy}", net, optimizer)["version"]})
    return found


def two_layers() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))


def train_layers(net, optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = net(torch.linspace(-1, 1, 128).view(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _no_space(file) -> None:
    raise OSError(28, "No space left on device")


def main(arguments: list[str]) -> None:
    """Run the tasks that a "+" separates; each prints one line."""
    while arguments:
        end = arguments.index("+") if "+" in arguments else len(arguments)
        (task, *values), arguments = arguments[:end], arguments[end + 1 :]
        print("result", json.dumps(globals()[task](*values)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
