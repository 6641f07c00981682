"""Compiled models with parameters in tiles: tiles, the head whose logits are never whole, its loss, and fused experts
are computed outside of graphs, with the bits of the model that is not compiled. A graph that must be whole is refused.

Where a block is several graphs, ``aot_eager`` may add gradients in another order; ``eager`` does not."""

import pytest
import strata
import torch
from compiled_training import Graphs, compile_blocks, train
from hf_models import MODELS, llama
from ranks import run_ranks
from soak import also
from tiny_models import (
    config_of,
    differences,
    full_parameters,
    loss_of,
    make_batches,
    make_engine,
    make_model,
    rank_and_world,
)

TILES = {"tiles": {"max_gather": "1KiB"}}


def _in_parts(model, backend):
    compile_blocks(model, backend, fullgraph=False)


def _tiny():
    config = config_of(3, strata=TILES)
    losses, weights, _ = train(make_model, config)
    backend = Graphs()
    compiled, compiled_weights, breaks = train(make_model, config, backend, before=_in_parts)
    assert compiled == losses and differences(compiled_weights, weights) == []
    # The norm, the activation between two tiled layers, and the sum; no graph holds anything of a tile.
    assert backend.made == 3, backend.made
    assert all("outside of graphs" in reason for reason in breaks), breaks


def test_tiles_end_a_graph_and_are_in_none():
    run_ranks(2, _tiny, timeout=240.0)


def _of_transformers(name, from_root):
    rank, _ = rank_and_world()
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model, backend = (llama() if name == "llama" else MODELS[name].build()).train(), Graphs("eager")
        engine = make_engine(model, config_of(3, strata={"tiles": {"max_gather": 5000}}))
        if compiled:
            engine.compile(backend, regional=not from_root)
        losses = []
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + rank)
            ids = torch.randint(3, 96, (2, 9), generator=generator)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found.append((losses, full_parameters(model)))
        engine.destroy()
    if from_root:  # a compiled frame takes whole logits, whose loss has sums in another order
        assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    else:
        assert found[0][0] == found[1][0] and differences(found[0][1], found[1][1]) == []
    return backend.made, [*torch._dynamo.utils.counters["graph_break"]]


# A head in tiles, with its loss, lies outside of blocks; experts in tiles within them.
@pytest.mark.parametrize("name, from_root", [("llama", False), ("qwen3_moe", False), *also(("llama", True))])
def test_heads_losses_and_experts_in_tiles_are_in_no_graph(name, from_root):
    for made, breaks in run_ranks(2, _of_transformers, name, from_root, timeout=240.0):
        assert made > 0 and not any("Tile" in reason.split("reason:")[0].split("Developer")[0] and
                                    "outside of graphs" not in reason for reason in breaks), breaks  # fmt: skip


def test_a_whole_graph_with_tiles_in_it_is_refused():
    config, refused = config_of(3, strata=TILES), "cannot be one graph: 'layers.0.up.weight' in it is used in tiles"
    model, tokens = make_model(), make_batches(1, 1)[0][0]
    compile_blocks(model, "eager")
    with pytest.raises(strata.UsageError, match=f"'layers.0' {refused}"):
        make_engine(model, config)
    engine = make_engine(make_model(), config)
    with pytest.raises(strata.UsageError, match=f"'Block' {refused}"):
        engine.compile("eager", {"fullgraph": True})
    assert not engine.is_compiled
    compile_blocks(engine.module, "eager")
    for _ in range(2):
        with pytest.raises(strata.UsageError, match=f"'layers.0' {refused}"):
            engine(tokens)
    compile_blocks(engine.module, "eager", fullgraph=False)
    engine.backward(loss_of(engine, tokens))
    engine.step()
    engine.destroy()
