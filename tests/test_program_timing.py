"""What instructions take, and that no model of the benchmarks has one that runs as Python."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from array_api_compat import array_namespace

pytest.importorskip("numba", reason="needs extra numba")

import xformer as xf
from benchmarks.gate_shapes import ALL
from benchmarks.shapes import Shape
from xformer import backends, optim, tree
from xformer.backends.numba.program import timing
from xformer.backends.numba.program.compiled import Compiled
from xformer.finetune import lora
from xformer.initializers import Shapes
from xformer.models import LanguageModel
from xformer.ops import RandomKey


def zeros(x: Any) -> Any:
    """A parameter that takes no memory until it is read."""
    return np.zeros(x.shape, np.float32)


def shortened(shape: Shape) -> Any:
    """Its model, of two layers where they can be left out."""
    model = shape.model
    if isinstance(model, LanguageModel):
        return replace(model, blocks=model.blocks[:2])
    if model.pad_id is not None:
        return model
    return replace(model, encoder=model.encoder[:2], decoder=model.decoder[:2])


def step_of(shape: Shape, model: Any) -> Any:
    def step(params: Any, state: Any, arrays: Any, masks: Any, number: Any) -> Any:
        if not shape.training:
            with xf.inference():
                return model.pooled(params, *arrays, **masks)[0]
        key = {"dropout_key": RandomKey(0, number)} if shape.dropout else {}
        loss, cache = model.loss(params, *arrays, **masks, **key)
        new, state = optim.adamw(tree.trained(params), cache.backward(), state, lr=1e-3)
        return new, state, loss

    return step


@pytest.mark.parametrize("shape", ALL, ids=lambda shape: shape.name)
def test_no_model_of_the_benchmarks_runs_as_python(shape: Shape) -> None:
    """Recorded in their own sizes, and not run."""
    model = shortened(shape)
    params = tree.map(zeros, model.init_from(Shapes()))
    if shape.lora_rank is not None:
        params = lora.attach(params, shape.lora_rank, 1.0, ("*",))
    arrays, masks = shape.batches(backends.get("numpy"))[0]
    state = optim.adamw_init(tree.map(zeros, tree.trained(params)))
    program, _ = Compiled(step_of(shape, model), (0, 1)).recorded(params, state, arrays, masks, 1)
    assert "; 0 run as Python" in program.explain(), program.explain()


def step(params: Any, x: Any) -> Any:
    xp = array_namespace(x)
    return {"w": xp.exp(params["w"]) + x}, xp.sum(x)


def test_a_table_of_instructions() -> None:
    params, x = {"w": np.ones((40, 50), np.float32)}, np.ones((40, 50), np.float32)
    compiled = xf.compile(step, donate=0)
    lines = compiled.timed(params, x).splitlines()
    assert lines[0].startswith("3 instructions, one by one ")
    assert len(lines) == 5
    took = [float(line.split()[0]) for line in lines[2:]]
    assert took == sorted(took, reverse=True) and min(took) > 0
    assert (params["w"] == 1).all()  # though it is donated
    new, total = compiled(params, x)
    assert new["w"] is params["w"] and float(total) == 2000


def test_each_instruction_in_order() -> None:
    fn = Compiled(step, (0,))
    program, inputs = fn.recorded({"w": np.ones(3, np.float32)}, np.ones(3, np.float32))
    found = timing.timed(program, inputs, 2)
    assert [one.instruction for one in found] == program.code and found[0].waits
    assert [one.number for one in found] == list(range(len(program.code)))


def test_where_there_is_no_program() -> None:
    strict = pytest.importorskip("array_api_strict", reason="array-api-strict is not installed")
    with pytest.raises(ValueError, match="timed: a call is no program here: backend array-api"):
        xf.compile(lambda x: x + 1).timed(strict.asarray([1.0]))
    with pytest.raises(TypeError, match="value"):
        xf.compile(lambda x: float(x[0])).timed(np.ones(2))
