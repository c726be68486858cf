"""Which public scripts `public_scripts.py` runs, what it changes in them (sizes, data, numbers that are printed), and behind which line the model is compiled.

Names that begin with a number are the rows of the survey of real loops from which the loop's tests came; `text` stands where a repository has a model and no script.
"""

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """One script."""

    repo: str  # OWNER+NAME, a folder of the clones
    file: str
    adds: Mapping[str, str] = dataclasses.field(default_factory=dict)  # beginning of a line -> the models that are compiled behind that statement
    edits: Sequence[tuple[str, str]] = ()  # text -> text
    args: Sequence[str] = ()
    before: str = ""  # Python that runs first, in the script's folder: it writes the data that the script reads
    text: str = ""  # the script itself
    path: Sequence[str] = ()  # further folders of the clones to import from
    batches: int = 3  # of every loader


E = "pytorch+examples"
TINY_TEXT = "import random, os\nr = random.Random(3)\nwords = [f'w{i}' for i in range(120)]\n"
NANO = ["--device=cpu", "--eval_iters=2", "--log_interval=1", "--block_size=32", "--batch_size=8", "--n_layer=2", "--n_head=2", "--n_embd=32", "--max_iters=6", "--lr_decay_iters=6",
        "--dropout=0.0", "--gradient_accumulation_steps=4", "--eval_interval=3", "--dataset=tiny", "--out_dir=out", "--always_save_checkpoint=True", "--dtype=float32"]  # fmt: skip
NANO_DATA = """
import os, numpy, pickle
os.makedirs("data/tiny", exist_ok=True)
for name in ("train", "val"):
    numpy.random.RandomState(5).randint(0, 60, 5000).astype("uint16").tofile(f"data/tiny/{name}.bin")
pickle.dump({"vocab_size": 60}, open("data/tiny/meta.pkl", "wb"))
"""
WIKI = TINY_TEXT + """
os.makedirs("data/wikitext-2", exist_ok=True)
for name, n in (("train", 150), ("valid", 20), ("test", 20)):
    with open(f"data/wikitext-2/{name}.txt", "w") as f:
        for _ in range(n):
            f.write(" ".join(r.choice(words) for _ in range(12)) + "\\n")
"""
CORA = """
import os, random
r = random.Random(4)
os.makedirs("cora", exist_ok=True)
n = 2003
with open("cora/cora.content", "w") as f:
    for i in range(n):
        f.write(f"{i} " + " ".join(str(int(r.random() < 0.1)) for _ in range(50)) + f" c{i % 7}\\n")
with open("cora/cora.cites", "w") as f:
    seen = set()
    while len(seen) < 4000:
        e = (r.randrange(n), r.randrange(n))
        if e not in seen and e[0] != e[1]:
            seen.add(e); f.write(f"{e[0]} {e[1]}\\n")
"""
WORDS = ["--emsize", "32", "--nhid", "32", "--batch_size", "16", "--bptt", "8", "--epochs", "1", "--dropout", "0", "--log-interval", "5", "--use-optimizer", "--lr", "0.01"]
DCGAN = ["--dataset", "fake", "--batchSize", "8", "--imageSize", "64", "--ngf", "4", "--ndf", "4", "--nz", "10", "--niter", "1", "--manualSeed", "3", "--workers", "0"]
RECIPES = {
    "01 nanogpt": Recipe(repo="karpathy+nanoGPT", file="train.py", adds={"model.to(device)": "model"}, args=[*NANO, "--compile=False"], before=NANO_DATA),
    "01b nanogpt_compile_place": Recipe(repo="karpathy+nanoGPT", file="train.py", edits=[("model = torch.compile(model) #", "model = add_the_line(model) #")], args=NANO, before=NANO_DATA),
    "02 nanogpt_resume": Recipe(repo="karpathy+nanoGPT", file="train.py", adds={"model.to(device)": "model"}, args=[*NANO, "--compile=False", "--init_from=resume", "--max_iters=5"],
        before=NANO_DATA + """
import torch, sys
sys.path.insert(0, ".")
from model import GPT, GPTConfig
torch.manual_seed(5)
a = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, bias=False, vocab_size=60, dropout=0.0)
m = GPT(GPTConfig(**a)); o = m.configure_optimizers(1e-1, 6e-4, (0.9, 0.95), "cpu")
x = torch.randint(0, 60, (8, 32)); m(x, x)[1].backward(); o.step()
os.makedirs("out", exist_ok=True)
torch.save({"model": m.state_dict(), "optimizer": o.state_dict(), "model_args": a, "iter_num": 1, "best_val_loss": 9.0, "config": {}}, "out/ckpt.pt")
"""),
    "03 nanogpt_sample": Recipe(repo="karpathy+nanoGPT", file="sample.py", adds={"model.to(device)": "model"}, edits=[("print(decode(y[0].tolist()))", "[t.item() for t in y[0]]; print(y[0].tolist())")],
        args=["--device=cpu", "--dtype=float32", "--out_dir=out", "--num_samples=1", "--max_new_tokens=20", "--start=1 2 3", "--compile=False"],
        before="""
import torch, sys, os
sys.path.insert(0, ".")
from model import GPT, GPTConfig
torch.manual_seed(5)
a = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, bias=False, vocab_size=60, dropout=0.0)
m = GPT(GPTConfig(**a))
os.makedirs("out", exist_ok=True)
torch.save({"model": m.state_dict(), "model_args": a, "config": {"dataset": "none"}}, "out/ckpt.pt")
import types
t = types.ModuleType("tiktoken")
class Enc:
    def encode(self, s, allowed_special=None): return [int(k) for k in s.split()]
    def decode(self, l): return str(l)
t.get_encoding = lambda n: Enc()
sys.modules["tiktoken"] = t
"""),
    "04 mnist": Recipe(repo=E, file="mnist/main.py", adds={"model = Net().to(device)": "model"}, args=["--batch-size", "16", "--test-batch-size", "40", "--epochs", "2", "--log-interval", "1"]),
    "05 mnist_rnn": Recipe(repo=E, file="mnist_rnn/main.py", adds={"model = Net().to(device)": "model"}, args=["--batch-size", "16", "--test-batch-size", "40", "--epochs", "2", "--log-interval", "1"]),
    "06 vae": Recipe(repo=E, file="vae/main.py", adds={"model = VAE().to(device)": "model"}, edits=[("eps = torch.randn_like(std)", "eps = torch.zeros_like(std)")], args=["--batch-size", "64", "--epochs", "2", "--log-interval", "1"], before="import os; os.makedirs('results', exist_ok=True)"),
    "07 dcgan_both": Recipe(repo=E, file="dcgan/main.py", adds={"print(netG)": "netG", "print(netD)": "netD"}, args=DCGAN),
    "08a dcgan_only_D": Recipe(repo=E, file="dcgan/main.py", adds={"print(netD)": "netD"}, args=DCGAN),
    "08b dcgan_only_G": Recipe(repo=E, file="dcgan/main.py", adds={"print(netG)": "netG"}, args=DCGAN),
    "09 dcgan_one_module": Recipe(repo=E, file="dcgan/main.py", edits=[("criterion = nn.BCELoss()", "both = add_the_line(nn.ModuleDict({'G': netG, 'D': netD}))\nnetG, netD = both['G'], both['D']\ncriterion = nn.BCELoss()")], args=DCGAN),
    "10 regression": Recipe(repo=E, file="regression/main.py", adds={"fc = torch": "fc"}, edits=[("count(1)", "range(1, 40)"), ("print('Loss: {:.6f}", "[v.item() for p in fc.parameters() for v in p.flatten()]\nprint('Loss: {:.6f}")]),
    "11 time_sequence_lbfgs": Recipe(repo=E, file="time_sequence_prediction/train.py", adds={"seq.double()": "seq"}, edits=[("future = 1000", "future = 10")], args=["--steps", "2"],
        before="import numpy, torch; x = numpy.empty((11, 25), 'int64'); x[:] = numpy.arange(25) + numpy.random.RandomState(2).randint(-80, 80, 11).reshape(11, 1); torch.save(numpy.sin(x / 20.0).astype('float64'), 'traindata.pt'); _l = torch.load; torch.load = lambda f, **k: _l(f, weights_only=False)"),
    "12 time_sequence_adam": Recipe(repo=E, file="time_sequence_prediction/train.py", adds={"seq.double()": "seq"}, edits=[("future = 1000", "future = 10"), ("optim.LBFGS(seq.parameters(), lr=0.8)", "optim.Adam(seq.parameters(), lr=0.01)"), ("optimizer.step(closure)", "closure(); optimizer.step()")], args=["--steps", "4"],
        before="import numpy, torch; x = numpy.empty((11, 25), 'int64'); x[:] = numpy.arange(25) + numpy.random.RandomState(2).randint(-80, 80, 11).reshape(11, 1); torch.save(numpy.sin(x / 20.0).astype('float64'), 'traindata.pt'); _l = torch.load; torch.load = lambda f, **k: _l(f, weights_only=False)"),
    "13 forward_forward_net": Recipe(repo=E, file="mnist_forward_forward/main.py", edits=[("net = Net([784, 500, 500])", "net = Net([784, 50, 50])\n    net = add_the_line(net)")], args=["--epochs", "6", "--train_size", "64", "--test_size", "64", "--log-interval", "1"]),
    "14 forward_forward_layers": Recipe(repo=E, file="mnist_forward_forward/main.py", edits=[("net = Net([784, 500, 500])", "net = Net([784, 50, 50])\n    net.layers = [add_the_line(layer) for layer in net.layers]")], args=["--epochs", "6", "--train_size", "64", "--test_size", "64", "--log-interval", "1"]),
    "15 words_transformer": Recipe(repo=E, file="word_language_model/main.py", adds={"criterion = nn.NLLLoss()": "model"}, args=[*WORDS, "--model", "Transformer"], before=WIKI),
    "16 words_lstm": Recipe(repo=E, file="word_language_model/main.py", adds={"criterion = nn.NLLLoss()": "model"}, args=[*WORDS, "--model", "LSTM"], before=WIKI),
    "16b words_gru_by_hand": Recipe(repo=E, file="word_language_model/main.py", adds={"criterion = nn.NLLLoss()": "model"}, args=[*[w for w in WORDS if w not in ("--use-optimizer", "--lr", "0.01")], "--model", "GRU", "--lr", "5"], before=WIKI),
    "17 reinforce": Recipe(repo=E, file="reinforcement_learning/reinforce.py", adds={"policy = Policy()": "policy"}, edits=[("count(1)", "range(1, 4)"), ("for t in range(1, 10000):", "for t in range(1, 12):")]),
    "18 actor_critic": Recipe(repo=E, file="reinforcement_learning/actor_critic.py", adds={"model = Policy()": "model"}, edits=[("count(1)", "range(1, 4)"), ("for t in range(1, 10000):", "for t in range(1, 12):")]),
    "19 imagenet": Recipe(repo=E, file="imagenet/main.py", adds={"model = models.__dict__[args.arch]()": "model"}, args=["--dummy", "-b", "8", "--epochs", "1", "-p", "1", "-j", "0", "--seed", "3", "--no-accel"], batches=2),
    "20 siamese": Recipe(repo=E, file="siamese_network/main.py", adds={"model = SiameseNetwork().to(device)": "model"}, args=["--batch-size", "8", "--test-batch-size", "16", "--epochs", "1", "--log-interval", "1", "--lr", "0.1"], batches=2),
    "21 gcn": Recipe(repo=E, file="gcn/main.py", adds={"gcn = GCN(": "gcn"}, edits=[("    with requests.get(cora_url, stream=True) as tgz_file:\n        with tarfile.open(fileobj=tgz_file.raw, mode='r:gz') as tgz_object:\n            tgz_object.extractall()", "")], args=["--epochs", "4", "--val-every", "1"], before=CORA),
    "22 gat": Recipe(repo=E, file="gat/main.py", adds={"gat_net = GAT(": "gat_net"}, args=["--epochs", "3", "--val-every", "1", "--hidden-dim", "8", "--num-heads", "2"], before=CORA.replace("n = 2003", "n = 1801").replace("4000", "3000")),
    "23 fast_neural_style": Recipe(repo=E, file="fast_neural_style/neural_style/neural_style.py", adds={"transformer = TransformerNet().to(device)": "transformer"}, args=["train", "--dataset", "x", "--style-image", "style.jpg", "--save-model-dir", "out", "--epochs", "1", "--batch-size", "2", "--image-size", "64", "--style-size", "64", "--log-interval", "1"], batches=2,
        before="import numpy, os, torchvision; from PIL import Image; Image.ANTIALIAS = Image.LANCZOS; Image.fromarray(numpy.random.RandomState(1).randint(0, 256, (80, 80, 3)).astype('uint8')).save('style.jpg'); _v = torchvision.models.vgg16; torchvision.models.vgg16 = lambda weights=None: _v(weights=None)"),
    "24b super_resolution": Recipe(repo=E, file="super_resolution/main.py", adds={"model = Net(": "model"}, args=["--upscale_factor", "3", "--batchSize", "4", "--testBatchSize", "4", "--nEpochs", "2", "--lr", "0.001", "--threads", "0"],
        before="import numpy, os; from PIL import Image\nfor n in ('train', 'test'):\n    os.makedirs(f'dataset/BSDS300/images/{n}')\n    for k in range(10):\n        Image.fromarray(numpy.random.RandomState(k).randint(0, 256, (321, 481, 3)).astype('uint8')).save(f'dataset/BSDS300/images/{n}/{k}.png')"),
    "25 llama2_fsdp_tp": Recipe(repo=E, file="distributed/tensor_parallelism/loop.py", text="""
import torch
from llama2_model import Transformer, ModelArgs
model = Transformer(ModelArgs(dim=64, n_layers=2, n_heads=4, vocab_size=256, max_seq_len=32))
model = add_the_line(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)
for i in range(4):
    torch.manual_seed(i)
    inp = torch.randint(256, (8, 16))
    output = model(inp)
    loss = output.sum() / 1000
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
"""),
    "26 mingpt_adder": Recipe(repo="karpathy+minGPT", file="projects/adder/adder.py", path=["karpathy+minGPT"], adds={"model = GPT(config.model)": "model"}, args=["--model.model_type=gpt-nano", "--trainer.max_iters=6", "--trainer.device=cpu", "--trainer.num_workers=0", "--trainer.batch_size=16", "--data.ndigit=1"],
        edits=[("if trainer.iter_num % 10 == 0", "if trainer.iter_num % 1 == 0"), ("trainer.iter_num % 500 == 0", "trainer.iter_num % 3 == 2")], batches=100),
    "26b mingpt_chargpt": Recipe(repo="karpathy+minGPT", file="projects/chargpt/chargpt.py", path=["karpathy+minGPT"], adds={"model = GPT(config.model)": "model"}, args=["--model.model_type=gpt-nano", "--trainer.max_iters=4", "--trainer.device=cpu", "--trainer.num_workers=0", "--trainer.batch_size=8", "--data.block_size=32"],
        edits=[("if trainer.iter_num % 10 == 0", "if trainer.iter_num % 1 == 0")], before=TINY_TEXT + "open('input.txt', 'w').write(' '.join(r.choice(words) for _ in range(800)) + 'O God, O God!')", batches=100),
    "27 mingpt_ddp_autocast": Recipe(repo=E, file="distributed/minGPT-ddp/mingpt/loop.py", text="""
import torch
from model import GPT, GPTConfig, OptimizerConfig, create_optimizer
model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=60, block_size=16, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0))
model = add_the_line(model)
optimizer = create_optimizer(model, OptimizerConfig())
for i in range(5):
    source = torch.randint(60, (8, 16)); targets = torch.randint(60, (8, 16))
    with torch.set_grad_enabled(True), torch.amp.autocast(device_type="cpu", dtype=torch.bfloat16, enabled=True):
        _, loss = model(source, targets)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(loss.item())
"""),
    "28 mingpt_ddp_gradscaler": Recipe(repo=E, file="distributed/minGPT-ddp/mingpt/loop.py", text="""
import torch
from model import GPT, GPTConfig, OptimizerConfig, create_optimizer
model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=60, block_size=16, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0))
model = add_the_line(model)
optimizer = create_optimizer(model, OptimizerConfig())
scaler = torch.amp.GradScaler("cpu")
for i in range(5):
    source = torch.randint(60, (8, 16)); targets = torch.randint(60, (8, 16))
    _, loss = model(source, targets)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(loss.item())
"""),
    "29 build_nanogpt": Recipe(repo="karpathy+build-nanogpt", file="train_gpt2.py", adds={"model.to(device)": "model"}, edits=[
        ("GPTConfig(vocab_size=50304)", "GPTConfig(vocab_size=256, n_layer=2, n_head=2, n_embd=32, block_size=64)"), ("total_batch_size = 524288", "total_batch_size = 1024"), ("B = 64", "B = 8"), ("T = 1024", "T = 32"), ("max_steps = 19073", "max_steps = 4"),
        ("raw_model = model.module if ddp else model", "raw_model = model"), ("from hellaswag import", "pass #"), ("import tiktoken", "class tiktoken:\n    @staticmethod\n    def get_encoding(n):\n        class E:\n            def encode(self, s): return [1, 2, 3]\n            def decode(self, l): return str(l)\n        return E()"),
        ("(step % 250 == 0 or last_step) and (not use_compile)", "False"), ("with torch.autocast(device_type=device_type, dtype=torch.bfloat16):", "if True:")],
        before="import numpy, os; os.makedirs('edu_fineweb10B'); [numpy.save(f'edu_fineweb10B/{n}_0.npy', numpy.random.RandomState(3).randint(0, 250, 20000).astype('uint16')) for n in ('train', 'val')]"),
    "30 mamba_minimal": Recipe(repo="johnma2006+mamba-minimal", file="loop.py", text="""
import torch
from model import Mamba, ModelArgs
model = Mamba(ModelArgs(d_model=32, n_layer=2, vocab_size=64))
model = add_the_line(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for i in range(3):
    x = torch.randint(64, (8, 12))
    loss = torch.nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    print(loss.item())
"""),
    "31 dit": Recipe(repo="facebookresearch+DiT", file="loop.py", text="""
import torch
from copy import deepcopy
from collections import OrderedDict
from models import DiT
from diffusion import create_diffusion
@torch.no_grad()
def update_ema(ema_model, model, decay=0.9):
    ema_params = OrderedDict(ema_model.named_parameters())
    for name, param in OrderedDict(model.named_parameters()).items():
        ema_params[name].mul_(decay).add_(param.data, alpha=1 - decay)
model = DiT(input_size=8, patch_size=2, hidden_size=32, depth=2, num_heads=2, num_classes=10, class_dropout_prob=0.0)
for p in model.parameters():
    p.data.add_(torch.randn_like(p) * 0.02)
ema = deepcopy(model)
model = add_the_line(model)
diffusion = create_diffusion(timestep_respacing="")
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
update_ema(ema, model, decay=0)
model.train(); ema.eval()
running = 0
for i in range(4):
    x = torch.randn(8, 4, 8, 8); y = torch.randint(10, (8,))
    t = torch.randint(0, diffusion.num_timesteps, (x.shape[0],))
    loss = diffusion.training_losses(model, x, t, dict(y=y))["loss"].mean()
    opt.zero_grad(); loss.backward(); opt.step(); update_ema(ema, model)
    running += loss.item()
print(running, [p.sum().item() for p in ema.parameters()][:3])
"""),
    "32 muon": Recipe(repo="lucidrains+vit-pytorch", file="loop.py", path=["KellerJordan+Muon"], text="""
import torch
from vit_pytorch import ViT
from muon import SingleDeviceMuonWithAuxAdam
model = ViT(image_size=16, patch_size=4, num_classes=10, dim=32, depth=2, heads=2, mlp_dim=64)
model = add_the_line(model)
hidden = [p for p in model.transformer.parameters() if p.ndim >= 2]
ids = {id(p) for p in hidden}
others = [p for p in model.parameters() if id(p) not in ids]
opt = SingleDeviceMuonWithAuxAdam([dict(params=hidden, use_muon=True, lr=0.02, weight_decay=0.01), dict(params=others, use_muon=False, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.01)])
for i in range(4):
    x = torch.randn(8, 3, 16, 16); y = torch.randint(10, (8,))
    loss = torch.nn.functional.cross_entropy(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
    print(loss.item())
"""),
    "33 vit_distill": Recipe(repo="lucidrains+vit-pytorch", file="loop.py", text="""
import torch
from torchvision.models import resnet18
from vit_pytorch.distill import DistillableViT, DistillWrapper
teacher = resnet18(weights=None, num_classes=10)
v = DistillableViT(image_size=32, patch_size=8, num_classes=10, dim=32, depth=2, heads=2, mlp_dim=64, dropout=0.0, emb_dropout=0.0)
distiller = DistillWrapper(student=v, teacher=teacher, temperature=3, alpha=0.5, hard=False)
distiller = add_the_line(distiller)
opt = torch.optim.Adam(distiller.parameters(), lr=1e-3)
for i in range(3):
    img = torch.randn(8, 3, 32, 32); labels = torch.randint(0, 10, (8,))
    loss = distiller(img, labels)
    opt.zero_grad(); loss.backward(); opt.step()
    print(loss.item())
"""),
    "33b vit": Recipe(repo="lucidrains+vit-pytorch", file="loop.py", text="""
import torch
from vit_pytorch import ViT
model = ViT(image_size=16, patch_size=4, num_classes=10, dim=32, depth=2, heads=2, mlp_dim=64)
model = add_the_line(model)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for i in range(4):
    loss = torch.nn.functional.cross_entropy(model(torch.randn(8, 3, 16, 16)), torch.randint(10, (8,)))
    opt.zero_grad(); loss.backward(); opt.step(); print(loss.item())
"""),
    "34 timm_convnext_ema": Recipe(repo="lucidrains+vit-pytorch", file="loop.py", text="""
import torch, timm
from timm.utils import ModelEmaV3
model = timm.create_model("convnext_atto", num_classes=10, drop_path_rate=0.0)
model = add_the_line(model)
ema = ModelEmaV3(model, decay=0.9)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-5)
for i in range(3):
    loss = torch.nn.functional.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.randint(10, (8,)))
    opt.zero_grad(); loss.backward(); opt.step(); ema.update(model); print(loss.item())
print([p.sum().item() for p in ema.module.parameters()][:5])
"""),
    "35a ddp_of_compiled": Recipe(repo="lucidrains+vit-pytorch", file="loop.py", text="""
import torch, os
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29611")
torch.distributed.init_process_group("gloo", rank=0, world_size=1)
m = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
m = torch.nn.parallel.DistributedDataParallel(add_the_line(m))
opt = torch.optim.AdamW(m.parameters(), lr=1e-2)
for i in range(4):
    loss = m(torch.randn(8, 8)).pow(2).mean(); opt.zero_grad(); loss.backward(); opt.step(); print(loss.item())
"""),
    "35b compiled_ddp": Recipe(repo="lucidrains+vit-pytorch", file="loop.py", text="""
import torch, os
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29612")
torch.distributed.init_process_group("gloo", rank=0, world_size=1)
m = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
m = add_the_line(torch.nn.parallel.DistributedDataParallel(m))
opt = torch.optim.AdamW(m.parameters(), lr=1e-2)
for i in range(4):
    loss = m(torch.randn(8, 8)).pow(2).mean(); opt.zero_grad(); loss.backward(); opt.step(); print(loss.item())
"""),
    "36a compiled_torch_compile": Recipe(repo="lucidrains+vit-pytorch", file="loop.py", text="""
import torch
m = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
m = add_the_line(torch.compile(m, backend="eager"))
opt = torch.optim.AdamW(m.parameters(), lr=1e-2)
for i in range(4):
    loss = m(torch.randn(8, 8)).pow(2).mean(); opt.zero_grad(); loss.backward(); opt.step(); print(loss.item())
"""),
    "36b torch_compile_of_compiled": Recipe(repo="lucidrains+vit-pytorch", file="loop.py", text="""
import torch
m = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
m = torch.compile(add_the_line(m), backend="eager")
opt = torch.optim.AdamW(m.parameters(), lr=1e-2)
for i in range(4):
    loss = m(torch.randn(8, 8)).pow(2).mean(); opt.zero_grad(); loss.backward(); opt.step(); print(loss.item())
"""),
}

GAN = ["--n_epochs", "1", "--batch_size", "8", "--sample_interval", "1000"]


def gan(name, models="generator discriminator", before="discriminator = Discriminator(", edits=(), args=()):
    return Recipe(repo="eriklindernoren+PyTorch-GAN", file=f"implementations/{name}/{name}.py", adds={before: models}, args=[*GAN, *args], edits=list(edits))


def nlp(folder, file, model, steps=6, adds=None, edits=(), old="range(5000)"):
    return Recipe(repo="graykode+nlp-tutorial", file=f"{folder}/{file}.py", adds=adds or {f"model = {model}()": "model"}, edits=[(old, f"range({steps})"), ("loss.backward()", "loss.backward(); print(loss.item())"), *edits])


Y = "yunjey+pytorch-tutorial"
MOR = "MorvanZhou+PyTorch-Tutorial"
RECIPES |= {
    "g1 gan": gan("gan"), "g2 wgan": gan("wgan", args=["--n_critic", "2"]), "g3 acgan": gan("acgan"), "g4 lsgan": gan("lsgan"), "g5 infogan": gan("infogan"), "g6 aae": gan("aae", "encoder decoder discriminator"),
    "g7 dragan": gan("dragan", edits=[("mnist_loader", "dataloader")]), "g8 wgan_gp": gan("wgan_gp", args=["--n_critic", "2"]), "g9 wgan_div": gan("wgan_div", args=["--n_critic", "2"]),
    "g10 ebgan": gan("ebgan"), "g11 sgan": gan("sgan"), "g12 softmax_gan": gan("softmax_gan"), "g13 relativistic_gan": gan("relativistic_gan"), "g14 dcgan": gan("dcgan"), "g15 bgan": gan("bgan", edits=[("mnist_loader", "dataloader")]),
    "g16 began": gan("began"), "g18 cgan": gan("cgan"),
    "n1 nnlm": nlp("1-1.NNLM", "NNLM", "NNLM"), "n2 word2vec": nlp("1-2.Word2Vec", "Word2Vec-Skipgram(Softmax)", "Word2Vec", edits=[("plt.show()", "pass")]),
    "n3 textcnn": nlp("2-1.TextCNN", "TextCNN", "TextCNN"), "n4 textrnn": nlp("3-1.TextRNN", "TextRNN", "TextRNN"), "n5 textlstm": nlp("3-2.TextLSTM", "TextLSTM", "TextLSTM", old="range(1000)"),
    "n6 bilstm": nlp("3-3.Bi-LSTM", "Bi-LSTM", "BiLSTM", old="range(10000)"), "n7 seq2seq": nlp("4-1.Seq2Seq", "Seq2Seq", "Seq2Seq"), "n8 seq2seq_attention": nlp("4-2.Seq2Seq(Attention)", "Seq2Seq(Attention)", "Attention", old="range(2000)", edits=[("plt.show()", "pass")]),
    "n9 bilstm_attention": nlp("4-3.Bi-LSTM(Attention)", "Bi-LSTM(Attention)", "BiLSTM_Attention", edits=[("plt.show()", "pass")]),
    "n10 transformer": nlp("5-1.Transformer", "Transformer", "Transformer", 3, old="range(20)", edits=[("d_model = 512", "d_model = 64"), ("d_ff = 2048", "d_ff = 64"), ("n_layers = 6", "n_layers = 2"), ("plt.show()", "pass")]),
    "n11 bert": nlp("5-2.BERT", "BERT", "BERT", 4, old="range(100)", edits=[("d_model = 768", "d_model = 64"), ("d_ff = 768 * 4", "d_ff = 128"), ("n_layers = 6", "n_layers = 2")]),
    "y1 feedforward": Recipe(repo=Y, file="tutorials/01-basics/feedforward_neural_network/main.py", adds={"model = NeuralNet(": "model"}, edits=[("(i+1) % 100 == 0", "True"), ("num_epochs = 5", "num_epochs = 2")]),
    "y2 logistic": Recipe(repo=Y, file="tutorials/01-basics/logistic_regression/main.py", adds={"model = nn.Linear(": "model"}, edits=[("(i+1) % 100 == 0", "True"), ("num_epochs = 5", "num_epochs = 2")]),
    "y3 linear": Recipe(repo=Y, file="tutorials/01-basics/linear_regression/main.py", adds={"model = nn.Linear(": "model"}),
    "y4 cnn": Recipe(repo=Y, file="tutorials/02-intermediate/convolutional_neural_network/main.py", adds={"model = ConvNet(": "model"}, edits=[("(i+1) % 100 == 0", "True"), ("num_epochs = 5", "num_epochs = 2"), ("batch_size = 100", "batch_size = 12")]),
    "y5 resnet": Recipe(repo=Y, file="tutorials/02-intermediate/deep_residual_network/main.py", adds={"model = ResNet(": "model"}, edits=[("(i+1) % 100 == 0", "True"), ("num_epochs = 80", "num_epochs = 1"), ("batch_size = 100", "batch_size = 12")]),
    "y6 rnn": Recipe(repo=Y, file="tutorials/02-intermediate/recurrent_neural_network/main.py", adds={"model = RNN(": "model"}, edits=[("(i+1) % 100 == 0", "True"), ("num_epochs = 2", "num_epochs = 1"), ("batch_size = 100", "batch_size = 12")]),
    "y7 birnn": Recipe(repo=Y, file="tutorials/02-intermediate/bidirectional_recurrent_neural_network/main.py", adds={"model = BiRNN(": "model"}, edits=[("(i+1) % 100 == 0", "True"), ("num_epochs = 2", "num_epochs = 1"), ("batch_size = 100", "batch_size = 12")]),
    "y8 rnn_lm": Recipe(repo=Y, file="tutorials/02-intermediate/language_model/main.py", adds={"model = RNNLM(": "model"}, edits=[("embed_size = 128", "embed_size = 32"), ("hidden_size = 1024", "hidden_size = 32"), ("num_epochs = 5", "num_epochs = 1"), ("seq_length = 30", "seq_length = 10"), ("step % 100 == 0", "True"), ("num_samples = 1000", "num_samples = 3")],
        before=TINY_TEXT + "os.makedirs('data', exist_ok=True)\nopen('data/train.txt', 'w').write('\\n'.join(' '.join(r.choice(words) for _ in range(12)) for _ in range(70)))"),
    "y9 vae": Recipe(repo=Y, file="tutorials/03-advanced/variational_autoencoder/main.py", adds={"model = VAE()": "model"}, edits=[("eps = torch.randn_like(std)", "eps = torch.zeros_like(std)"), ("num_epochs = 15", "num_epochs = 2"), ("(i+1) % 10 == 0", "True"), ("batch_size = 128", "batch_size = 16")]),
    "y10 gan": Recipe(repo=Y, file="tutorials/03-advanced/generative_adversarial_network/main.py", adds={"D = D.to(device)": "D", "G = G.to(device)": "G"}, edits=[("num_epochs = 200", "num_epochs = 1"), ("(i+1) % 200 == 0", "True"), ("batch_size = 100", "batch_size = 16"), ("images = images.reshape(batch_size, -1)", "images = images[:, :1].reshape(batch_size, -1)"), ("mean=(0.5, 0.5, 0.5)", "mean=(0.5,)"), ("std=(0.5, 0.5, 0.5)", "std=(0.5,)")][:3]),
    "m1 regression": Recipe(repo=MOR, file="tutorial-contents/301_regression.py", adds={"net = Net(": "net"}, edits=[("range(200)", "range(12)"), ("plt.pause(0.1)", "print(loss.item())")]),
    "m2 classification": Recipe(repo=MOR, file="tutorial-contents/302_classification.py", adds={"net = Net(": "net"}, edits=[("range(100)", "range(12)"), ("plt.pause(0.1)", "print(loss.item())")]),
    "m3 optimizers": Recipe(repo=MOR, file="tutorial-contents/306_optimizer.py", adds={"nets = [": "net_SGD net_Momentum net_RMSprop net_Adam"}, edits=[("nets = [net_SGD, net_Momentum, net_RMSprop, net_Adam]", "nets = []\n    nets = [net_SGD, net_Momentum, net_RMSprop, net_Adam]"), ("EPOCH = 12", "EPOCH = 2")]),
    "m4 rnn_classifier": Recipe(repo=MOR, file="tutorial-contents/402_RNN_classifier.py", adds={"rnn = RNN()": "rnn"}, edits=[("step % 50 == 0", "True"), ("test_data.test_data.type", "test_data.test_data[:40].type"), (".test_labels.numpy()[:2000]", ".test_labels.numpy()[:40]"), ("BATCH_SIZE = 64", "BATCH_SIZE = 16")]),
    "m5 rnn_regressor": Recipe(repo=MOR, file="tutorial-contents/403_RNN_regressor.py", adds={"rnn = RNN()": "rnn"}, edits=[("for step in range(100)", "for step in range(6)"), ("plt.draw(); plt.pause(0.05)", "print(loss.item())")]),
    "m6 autoencoder": Recipe(repo=MOR, file="tutorial-contents/404_autoencoder.py", adds={"autoencoder = AutoEncoder()": "autoencoder"}, edits=[("EPOCH = 10", "EPOCH = 2"), ("step % 100 == 0", "True"), ("plt.draw(); plt.pause(0.05)", "print(loss.item())"), ("fig = plt.figure(2)", "raise SystemExit"), ("train_data[:200]", "train_data[:40]")][:4]),
    "m7 gan": Recipe(repo=MOR, file="tutorial-contents/406_GAN.py", edits=[("opt_D = torch", "D = add_the_line(D); G = add_the_line(G)\nopt_D = torch"), ("range(10000)", "range(5)"), ("plt.text(-.5, 2,", "print(D_loss.item(), G_loss.item());plt.text(-.5, 2,"), ("step % 50 == 0", "True"), ("plt.pause(0.01)", "")]),
    "m8 conditional_gan": Recipe(repo=MOR, file="tutorial-contents/406_conditional_GAN.py", edits=[("opt_D = torch", "D = add_the_line(D); G = add_the_line(G)\nopt_D = torch"), ("range(10000)", "range(5)"), ("step % 200 == 0", "True"), ("plt.pause(0.1)", "print(D_loss.item(), G_loss.item())")]),
    "m9 batch_norm": Recipe(repo=MOR, file="tutorial-contents/504_batch_normalization.py", edits=[("nets = [Net(batch_normalization=False), Net(batch_normalization=True)]", "nets = [add_the_line(Net(batch_normalization=False)), add_the_line(Net(batch_normalization=True))]"), ("EPOCH = 12", "EPOCH = 2"), ("plt.pause(0.01)", "")]),
    "m10 dropout": Recipe(repo=MOR, file="tutorial-contents/503_dropout.py", edits=[("optimizer_ofit = torch", "net_overfitting = add_the_line(net_overfitting); net_dropped = add_the_line(net_dropped)\noptimizer_ofit = torch"), ("range(500)", "range(12)"), ("plt.pause(0.1)", "print(loss_ofit.item(), loss_drop.item())")]),
    "k1 bigram": Recipe(repo="karpathy+ng-video-lecture", file="bigram.py", adds={"m = model.to(device)": "model"}, edits=[("max_iters = 3000", "max_iters = 6"), ("eval_interval = 300", "eval_interval = 3"), ("eval_iters = 200", "eval_iters = 2"), ("loss.backward()", "loss.backward(); print(loss.item())"), ("max_new_tokens=500", "max_new_tokens=5")]),
    "k2 gpt": Recipe(repo="karpathy+ng-video-lecture", file="gpt.py", adds={"m = model.to(device)": "model"}, edits=[("max_iters = 5000", "max_iters = 4"), ("eval_interval = 500", "eval_interval = 3"), ("eval_iters = 200", "eval_iters = 2"), ("batch_size = 64", "batch_size = 8"), ("block_size = 256", "block_size = 32"), ("n_embd = 384", "n_embd = 48"), ("n_layer = 6", "n_layer = 2"), ("max_new_tokens=500", "max_new_tokens=5"), ("loss.backward()", "loss.backward(); print(loss.item())")],
        before=TINY_TEXT + "open('input.txt', 'w').write(' '.join(r.choice(words) for _ in range(800)))"),
    "c1 cifar_simple_dla": Recipe(repo="kuangliu+pytorch-cifar", file="main.py", adds={"net = net.to(device)": "net"}, edits=[("start_epoch+200", "start_epoch+1"), ("batch_size=128", "batch_size=8"), ("batch_size=100", "batch_size=8"), ("num_workers=2", "num_workers=0"), ("if acc > best_acc", "if acc > -1 and not os.path.isdir('checkpoint')")], args=["--lr", "0.01"], batches=2, before="import os, io; os.popen = lambda *a: io.StringIO(chr(50) + chr(52) + chr(32) + chr(56) + chr(48))"),
    "c2 cifar_mobilenetv2": Recipe(repo="kuangliu+pytorch-cifar", file="main.py", adds={"net = net.to(device)": "net"}, edits=[("net = SimpleDLA()", "net = ShuffleNetV2(1)"), ("start_epoch+200", "start_epoch+1"), ("batch_size=128", "batch_size=8"), ("batch_size=100", "batch_size=8"), ("num_workers=2", "num_workers=0")], args=["--lr", "0.01"], batches=2, before="import os, io; os.popen = lambda *a: io.StringIO(chr(50) + chr(52) + chr(32) + chr(56) + chr(48))"),
}
RECIPES["k1 bigram"] = dataclasses.replace(RECIPES["k1 bigram"], before=RECIPES["k2 gpt"].before)
