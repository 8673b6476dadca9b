"""torch's nn.Transformer and nn.TransformerEncoder: what they compute, their gradients, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from judges import require_close

from xformer import pretrained, tree
from xformer.initializers import Shapes
from xformer.pretrained.reading import PretrainedError

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402 - imports torch

B, S, T, D = 3, 7, 5, 12
LAYER: dict[str, Any] = {"d_model": D, "nhead": 2, "dim_feedforward": 20}
STACKS = {"num_encoder_layers": 2, "num_decoder_layers": 3}
# torch tells which of its fast paths it cannot take.
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
TOLERANCES = {"float64": 1e-12, "float32": 1e-5}
Values = dict[str, np.ndarray]


def transformer(**options: Any) -> tuple[Any, dict[str, Any]]:
    """An nn.Transformer, and its config.json."""
    arguments = LAYER | STACKS | options
    config = {"model_type": "nn.Transformer", **arguments}
    return randomized(torch.nn.Transformer(**arguments, batch_first=True)), config


def encoder(final_norm: bool, **options: Any) -> tuple[Any, dict[str, Any]]:
    """An nn.TransformerEncoder, and its config.json."""
    arguments = LAYER | options
    layer = torch.nn.TransformerEncoderLayer(**arguments, batch_first=True)
    norm = torch.nn.LayerNorm(
        D, eps=options.get("layer_norm_eps", 1e-5), bias=options.get("bias", True)
    )
    ending = {"norm": norm} if final_norm else {}
    stack = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False, **ending)
    config = {"model_type": "nn.TransformerEncoder", "num_layers": 2, "final_norm": final_norm}
    return randomized(stack), arguments | config


def randomized(module: Any) -> Any:
    """All parameters random, norms and biases too: torch starts many at 0 or 1."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return module.double().eval()


def stored(folder: Path, module: Any, config: dict[str, Any]) -> Path:
    """The folder of a state dict, as the loader wants it."""
    folder.mkdir()
    save_file(module.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def padded(length: int, side: str) -> np.ndarray:
    """(B, length): True for a token, where torch's masks say False."""
    keep = np.ones((B, length), np.bool_)
    for row, n in ((1, 2), (2, length - 1)):
        keep[row, {"none": slice(0), "left": slice(n), "right": slice(-n, None)}[side]] = False
    return keep


def prove(module: Any, config: dict[str, Any], folder: Path, *kept: np.ndarray) -> None:
    """The same output, gradients of all parameters and inputs; and saved so that torch loads it.

    kept: of the source, or of source and target.
    """
    home = stored(folder / "torch", module, config)
    rng = np.random.default_rng(0)
    vectors = [rng.normal(size=(*keep.shape, D)) for keep in kept]
    dy = rng.normal(size=vectors[-1].shape) * kept[-1][..., None]
    for dtype, tolerance in TOLERANCES.items():
        want = judged(module.to(getattr(torch, dtype)), vectors, dy, kept)
        model, params = pretrained.load(home, dtype=dtype)
        names = ["mask"] if len(kept) == 1 else ["src_mask", "tgt_mask"]
        inputs = [x.astype(dtype) for x in vectors]
        y, cache = model.forward(params, *inputs, **dict(zip(names, kept, strict=True)))
        dparams, *dinputs = cache.backward_all(dy.astype(dtype))
        got = pretrained.tensors_of(model, dparams) | {str(i): d for i, d in enumerate(dinputs)}
        require_close({"y": y[kept[-1]]} | got, want, tolerance)
    model, params = pretrained.load(home, dtype="float64")
    pretrained.save(model, params, folder / "ours")
    module.double().load_state_dict(load_file(folder / "ours" / "model.safetensors"))  # strict
    same = load_file(home / "model.safetensors")
    assert all(torch.equal(same[name], value) for name, value in module.state_dict().items())
    again, reread = pretrained.load(folder / "ours", dtype="float64")
    assert again.blocks == model.blocks if len(kept) == 1 else again.decoder == model.decoder
    was = tree.flatten(params)
    assert all(a.tobytes() == was[name].tobytes() for name, a in tree.flatten(reread).items())


def judged(module: Any, vectors: list[np.ndarray], dy: np.ndarray, kept: Any) -> Values:
    """torch's output where it is kept, and gradients of parameters and inputs.

    Parameters that want gradients turn off torch's fast path of evaluation, which gives the same.
    """
    dtype = next(module.parameters()).dtype
    inputs = [torch.tensor(x, dtype=dtype, requires_grad=True) for x in vectors]
    drop = [torch.tensor(~keep) for keep in kept]
    options: dict[str, Any] = {"src_key_padding_mask": drop[0]}
    if len(kept) == 2:
        causal = torch.ones(T, T, dtype=torch.bool).triu(1)
        options |= {"memory_key_padding_mask": drop[0], "tgt_key_padding_mask": drop[1]}
        options |= {"tgt_mask": causal}
    module.zero_grad()
    y = module(*inputs, **options)
    y.backward(torch.tensor(dy, dtype=dtype))
    here = {"y": y.detach().numpy()[kept[-1]]}
    if len(kept) == 1:  # in a decoder it gives NaN where a query sees no key
        with torch.no_grad():
            fast = module(*inputs, **options)
        require_close({"y": fast.numpy()[kept[-1]]}, here, TOLERANCES[str(dtype)[6:]])
    grads = {name: p.grad.numpy().copy() for name, p in module.named_parameters()}
    return here | grads | {str(i): x.grad.numpy() for i, x in enumerate(inputs)}


OPTIONS: list[dict[str, Any]] = [
    {},
    {"norm_first": True},
    {"activation": "gelu"},
    {"bias": False},
    {"norm_first": True, "activation": "gelu", "bias": False},
    {"layer_norm_eps": 0.1, "dropout": 0.3, "nhead": 3},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("src", "tgt"), [("none", "none"), ("left", "right"), ("right", "left")])
def test_transformer(options: dict[str, Any], src: str, tgt: str, tmp_path: Path) -> None:
    prove(*transformer(**options), tmp_path, padded(S, src), padded(T, tgt))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("final_norm", [False, True])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_encoder(options: dict[str, Any], final_norm: bool, side: str, tmp_path: Path) -> None:
    prove(*encoder(final_norm, **options), tmp_path, padded(S, side))


def test_what_a_configuration_leaves_out_is_as_in_torch(tmp_path: Path) -> None:
    module = torch.nn.Transformer(device="meta")
    model = pretrained.model({"model_type": "nn.Transformer"})
    arrays = pretrained.tensors_of(model, zeros(model))
    shapes = {name: tuple(p.shape) for name, p in module.state_dict().items()}
    assert {name: a.shape for name, a in arrays.items()} == shapes
    layer = module.decoder.layers[0]
    for config in (*model.encoder, *model.decoder):
        assert config.attn.n_heads == module.nhead and config.norm.eps == layer.norm1.eps
        assert config.dropout == config.attn.dropout == config.ffn.dropout == layer.dropout.p
        assert (
            config.ffn.activation == "relu"
            and config.norm_placement == "post"
            and not layer.norm_first
        )


def zeros(model: Any) -> Any:
    """Parameters of no memory."""
    like = model.init_from(Shapes())
    return tree.map(lambda leaf: np.broadcast_to(np.float32(0), leaf.shape), like)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "silu"}, "activation must be one of relu, gelu, got 'silu'"),
        ({"nhead": 5}, "n_heads = 5 must divide d_model = 12"),
        ({"custom_encoder": "mine"}, "not supported: 'custom_encoder'"),
        ({"is_decoder": True}, "is_decoder must be False, got True"),
        ({"num_layers": None}, "num_layers is missing"),
        ({"architectures": ["Mine"]}, "architectures must be"),
        ({"num_layers": 3}, "12 missing: 'layers.2.linear1.bias', "),
        ({"bias": False}, "unexpected: 'layers.0.linear1.bias', "),
        ({"final_norm": True}, "2 missing: 'norm.bias', 'norm.weight'"),
        ({"dim_feedforward": 7}, r"'layers.0.linear1.bias \(wanted \(7,\), got \(20,\)\)'"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    module, config = encoder(False)
    with pytest.raises(PretrainedError, match=message):
        pretrained.load(stored(tmp_path / "torch", module, config | changes))
