"""Loops that accumulate under axes whose ranks add up gradients of their own: what the loop sees of them are the sums."""

import pytest
import torch
import transformers
from tolerances import PARAMETERS_AFTER_STEPS, assert_close

import graphacc

STRATEGIES = ["dp=8", "dp=4,microbatches=2,tp=2", "fsdp=4,zero=1,dp=2", "dp=4,pp=2,microbatches=2", "pp=2,fsdp=2,zero=1,dp=2,microbatches=2,schedule=zb-h1", "dp=2,ep=2,fsdp=2"]


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_positions=16, n_embd=32, n_layer=2, n_head=4, vocab_size=64, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def mixture() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, num_local_experts=4, vocab_size=64, use_cache=False)
    return transformers.MixtralForCausalLM(config)


def train(model: torch.nn.Module) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Steps of two batches each, one of which clips, one reads gradients before and behind its second backward, one writes them between the two, and one has one batch alone."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), []
    generator = torch.Generator().manual_seed(1)
    for kind in ("plain", "clips", "reads", "writes", "one", "plain"):
        for half in range(1 if kind == "one" else 2):
            ids = torch.randint(64, (16, 8), generator=generator)
            loss = model(input_ids=ids, labels=ids).loss / 2
            loss.backward()
            seen.append(loss.item())
            if kind == "reads":
                seen += [float(p.grad.norm()) for p in model.parameters()]
            if kind == "writes" and not half:
                with torch.no_grad():
                    for p in model.parameters():
                        p.grad.mul_(0.5)
        if kind == "clips":
            seen.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        seen.append(model(input_ids=ids, labels=ids).loss.item())
    return seen, {name: x.detach().clone() for name, x in model.named_parameters()}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.default_cases("dp=8", "dp=4,pp=2,microbatches=2")
def test_what_the_loop_sees(strategy):
    make = mixture if "ep" in strategy else model
    expected, parameters = train(make())
    got, trained = train(graphacc.compile(make(), strategy=strategy, devices=8))
    assert_close(torch.tensor(got), torch.tensor(expected))
    for name, x in parameters.items():
        assert_close(trained[name], x, tolerance=PARAMETERS_AFTER_STEPS, what=name)
