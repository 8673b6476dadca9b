"""Tensor and sequence parallelism, on threads, against the whole model."""

from __future__ import annotations

import dataclasses
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import pytest
from causal_models import NAMES, V, causal, seq2seq
from numpy.typing import NDArray

import xformer as xf
from xformer import backends, distributed, generation, gradcheck, layers, optim, tree
from xformer.dispatch import Kernel
from xformer.distributed.partition import own_part
from xformer.distributed.world import World, threads
from xformer.layers.advance import advance
from xformer.layers.blocks import blocks
from xformer.models import (
    Classifier,
    Discriminator,
    EncoderDecoder,
    LanguageModel,
    LMHead,
    MaskedLMHead,
    Pooler,
    TokenClassifier,
)
from xformer.proofs import catalogue
from xformer.proofs.catalogue import Case

NUMPY = backends.get("numpy")
EXACT = 1e-12  # of the largest number of a tree: some gradients are 0 but for rounding


def require_same(got: Any, wanted: Any) -> None:
    """Equal trees up to rounding in float64."""
    a, b = tree.flatten({"": got}), tree.flatten({"": wanted})
    assert a.keys() == b.keys()
    scale = max(float(np.max(np.abs(x), initial=0)) for x in b.values())
    for name in b:
        assert a[name].shape == b[name].shape, name
        np.testing.assert_allclose(a[name], b[name], rtol=0, atol=EXACT * scale, err_msg=name)


# --- every option of the catalogue ---


MODELS = [case for case in catalogue.cases() if case.group == "models"]
OTHER_ATTENTION = "attn must be an AttentionConfig, got "
REFUSED = {  # name -> what the message says
    "LanguageModel: latent attention": OTHER_ATTENTION + "LatentAttentionConfig",
    "LanguageModel: gated DeltaNet": OTHER_ATTENTION + "GatedDeltaNetConfig",
    "GPT: dropout and loss options": "attn.dropout must be 0",
    "GPT: checkpointing, dropout": "attn.dropout must be 0",
    "GPT: reversible": "attn.dropout must be 0",
    "LanguageModel: segment, checkpointing, dropout": "attn.dropout must be 0",
    "Transformer: ReZero, shared memory": "shared_memory must be False",
    "Transformer: two layers each, shared memory": "shared_memory must be False",
    "Transformer: positions: learned, for q, k, v, shared memory": "shared_memory must be False",
    "Transformer: checkpointing, dropout": "shared_memory must be False",
    "Transformer: dropout and loss options": "attn.dropout must be 0",
    "EncoderDecoder: two embeddings, shared memory": "shared_memory must be False",
}
REFUSED_SEQUENCE = REFUSED | {
    "LanguageModel: hidden states": "out_dropout must be 0 with sequence",
    "LanguageModel: relative bias": "sequence = True needs no relative_bias",
}


def of_model(case: Case) -> tuple[Any, str | None]:
    """The model of a case, and the name of its method, if the case calls one."""
    fn: Any = case.build(NUMPY)[0]
    bound = getattr(fn.func, "__self__", None)
    return (fn.args[0], None) if bound is None else (bound, fn.func.__name__)


def parallel_case(case: Case, n: int, **options: Any) -> list[Any]:
    """(y, gradients) of each process, with the gradients of the whole parameters."""
    fn: Any
    fn, (params, *x) = case.build(NUMPY)
    model, method = of_model(case)
    y, cache = fn(params, *x)
    rng = np.random.default_rng(0)
    dy = tree.map(lambda a: np.asarray(rng.standard_normal(a.shape)), y)
    wanted = cache.backward(dy)

    def work(world: World) -> tuple[Any, Any]:
        part = distributed.tensor_parallel(model, world, **options)
        own = part.shard(params)
        call = partial(fn.func, part) if method is None else getattr(part, method)
        y, cache = call(own, *x, **fn.keywords)
        grads = cache.backward(dy)
        if x:
            return y, (part.whole(grads[0]), *grads[1:])
        return y, part.whole(grads)

    return [(y, wanted), *threads.run(n, work)]


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
@pytest.mark.parametrize("n", [1, 2])
def test_models(case: Case, n: int) -> None:
    refused = REFUSED.get(case.name)
    always = refused is not None and ("memory" in refused or OTHER_ATTENTION in refused)
    if refused and (n > 1 or always):
        with pytest.raises(ValueError, match=f"parallel: {refused}"):
            parallel_case(case, n)
        return
    wanted, *found = parallel_case(case, n)
    for got in found:
        require_same(got, wanted)


@pytest.mark.parametrize(
    "case",
    [case for case in MODELS if isinstance(of_model(case)[0], LanguageModel)],
    ids=lambda case: case.name,
)
def test_models_in_parts_of_the_sequence(case: Case) -> None:
    refused = REFUSED_SEQUENCE.get(case.name)
    if refused is not None:
        with pytest.raises(ValueError, match=f"parallel: {refused}"):
            parallel_case(case, 2, sequence=True)
        return
    wanted, *found = parallel_case(case, 2, sequence=True)
    for got in found:
        require_same(got, wanted)


# Blocks, blocks in sequence and stacks, with options that no case of a model has.
LAYERS = [case for case in catalogue.cases() if case.subject in ("block", "blocks", "stack")]
REFUSED_BLOCKS = {
    "block: latent attention": OTHER_ATTENTION + "LatentAttentionConfig",
    "block: latent attention, parallel": OTHER_ATTENTION + "LatentAttentionConfig",
    "block: gated DeltaNet": OTHER_ATTENTION + "GatedDeltaNetConfig",
    "block: gated DeltaNet, parallel": OTHER_ATTENTION + "GatedDeltaNetConfig",
    "block: OLMo 2": 'attn.qk_norm must be None or "head"',
    "block: heads' output bias": 'attn.output must be "linear"',
    "block: heads' output none": 'attn.output must be "linear"',
    "block: feed-forward of one linear layer": "ffn.down must be True",
}
# A mask of dropout depends on the index in all heads (refused by models), and the projection of a
# shared memory is outside the sublayers.
NOT_CUT = ("dropout", "shared memory", "stack: reversible", "one sequence, shared memory")


def is_cut(case: Case, sequence: bool) -> bool:
    fn: Any = case.build(NUMPY)[0]
    if sequence and fn.keywords.get("relative_bias") is not None:
        return False
    return not any(words in case.name for words in NOT_CUT)


def heads_of(world: World, a: Any, axis: int) -> Any:
    """Own heads of an array that has an axis of heads."""
    return a if a is None or a.shape[axis] == 1 else own_part(a, axis, world)


@pytest.mark.parametrize(
    ("case", "sequence"),
    [
        pytest.param(case, sequence, id=case.name + ", in parts of the sequence" * sequence)
        for case in LAYERS
        for sequence in (False, True)
        if is_cut(case, sequence)
    ],
)
def test_blocks(case: Case, sequence: bool) -> None:
    """Also gradients of x, memory, bias and positions."""
    fn: Any
    fn, (x, params, side) = case.build(NUMPY)
    options = dict(fn.keywords)
    name = "config" if "config" in options else "configs"
    configs = (options[name],) if name == "config" else options[name]
    relative = options.get("relative_bias")
    y, cache = fn(x, params, side)
    dy = np.random.default_rng(0).standard_normal(y.shape)
    wanted = cache.backward(dy)
    cuts = distributed.CUTS
    if configs[0].attn.kv_heads == 1:
        cuts = distributed.ONE_KEY_HEAD | cuts
    is_bias_per_head = side.bias is not None and side.bias.shape[-3] > 1

    def work(world: World) -> Any:
        def own(a: Any) -> Any:
            return own_part(a, -2, world) if sequence else a

        part: Any = tuple(
            distributed.parallel_block(config, world, sequence=sequence) for config in configs
        )
        kw = options | {name: part[0] if name == "config" else part}
        if relative is not None:
            kw["relative_bias"] = dataclasses.replace(relative, n_heads=1)
        if (past := options["context"].kv_cache) is not None:
            own_past = layers.KVCache(*(own_part(a, 1, world) for a in past[:2]))
            kw["context"] = options["context"]._replace(kv_cache=own_past)
        heads = tree.map_nodes(
            lambda _, kv: layers.KeyValue(*(own_part(a, 1, world) for a in kv)),
            side.memory,
            layers.KeyValue,
        )
        own_bias = None if side.bias is None else heads_of(world, side.bias, -3)
        own_side = side._replace(memory=heads, bias=own_bias)
        y, cache = fn.func(own(x), distributed.shard(params, world, cuts), own_side, **kw)
        dx, dparams, dside = cache.backward(own(dy))
        dbias = dside.bias
        if sequence:
            y, dx = (distributed.join(a, world=world, axis=-2)[0] for a in (y, dx))
            leaves = tree.flatten(dparams)  # of norms and scales: sums over the places
            leaves |= {
                key: world.all_reduce(dp)
                for key, dp in leaves.items()
                if distributed.cut_of(key, cuts) == "whole"
            }
            dparams = tree.unflatten(dparams, leaves)
        if dbias is not None:
            assert is_bias_per_head or dbias.shape[-3] == 1
            if is_bias_per_head:
                dbias, _ = distributed.join(dbias, world=world, axis=-3)
            else:
                dbias = world.all_reduce(dbias)
        dmemory = tree.map_nodes(
            lambda _, kv: layers.KeyValue(
                *(distributed.join(a, world=world, axis=1)[0] for a in kv)
            ),
            dside.memory,
            layers.KeyValue,
        )
        dparams = distributed.whole(dparams, world, cuts)
        return y, (dx, dparams, dside._replace(memory=dmemory, bias=dbias))

    if case.name in REFUSED_BLOCKS:
        with pytest.raises(ValueError, match=f"parallel: {REFUSED_BLOCKS[case.name]}"):
            threads.run(2, work)
        return
    for got in threads.run(2, work):
        require_same(got, (y, wanted))


# --- every family ---


def inputs(seed: int = 1) -> tuple[NDArray[Any], NDArray[Any]]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, V, (2, 6)), rng.integers(0, V, (2, 6))


# The heads' output; norms of all heads; another attention.
UNCUT = ("bare blocks", "olmo2", "olmo3", "deepseek_v3", "qwen3_5_text")
FAMILIES = [name for name in NAMES if name not in UNCUT]


@pytest.mark.parametrize(
    ("name", "sequence"),
    [(n, s) for n in FAMILIES for s in (False, True) if not (s and n == "relative bias")],
)
def test_families_on_three_processes(name: str, sequence: bool) -> None:
    """37 tokens and 20 hidden units are no multiples of 3; most families have one key head here."""
    model, params = causal(name)
    tokens, targets = inputs()
    mask = np.ones(tokens.shape, bool)
    mask[0, :2] = False
    options: Any = {"label_smoothing": 0.1, "z_loss": 1e-3, "mask": mask}
    if name in ("positions for q, k, v", "concatenated positions"):
        del options["mask"]
    loss, cache = model.loss(params, tokens, targets, **options)
    wanted = loss, cache.backward()

    def work(world: World) -> Any:
        part = distributed.tensor_parallel(model, world, sequence=sequence)
        loss, cache = part.loss(part.shard(params), tokens, targets, **options)
        return loss, part.whole(cache.backward())

    for got in threads.run(3, work):
        require_same(got, wanted)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "masked LM"])
@pytest.mark.parametrize("sequence", [False, True], ids=["heads", "heads and sequence"])
def test_logits_and_their_gradients(name: str, sequence: bool) -> None:
    """All processes have all logits, and the same gradient of them."""
    model, params = causal("gpt2" if name == "masked LM" else name)
    if name == "masked LM":
        model = dataclasses.replace(model, head=MaskedLMHead())
        params = params._replace(head=tree.map(lambda p: p + 0.1, model.init(dtype="float64").head))
    tokens, _ = inputs()
    logits, cache = model.forward(params, tokens)
    dlogits = np.random.default_rng(0).standard_normal(logits.shape)

    def work(world: World) -> Any:
        part = distributed.tensor_parallel(model, world, sequence=sequence)
        logits, cache = part.forward(part.shard(params), tokens)
        return logits, part.whole(cache.backward(dlogits))

    for got in threads.run(3, work):
        require_same(got, (logits, cache.backward(dlogits)))


@pytest.mark.parametrize("n", [2, 4])
def test_groups_of_key_heads(n: int) -> None:
    """Eight heads of queries in four groups."""
    attn = layers.AttentionConfig(16, 8, n_kv_heads=4, qk_norm="head", sinks=True)
    block = layers.BlockConfig(attn, layers.FeedForwardConfig(23, "silu", gated=True))
    embed = layers.EmbedConfig(V, 16, 16, positions="none")
    model = LanguageModel(
        embed, (block,) * 2, rotary=layers.RopeConfig(2), head=LMHead(tied=False, bias=True)
    )
    params = tree.map(lambda p: p + 0.1, model.init(dtype="float64"))
    tokens, targets = inputs()
    loss, cache = model.loss(params, tokens, targets)

    def work(world: World) -> Any:
        part = distributed.tensor_parallel(model, world)
        own = part.shard(params)
        assert own.stack.blocks[0].attn.kv.k.w.shape == (16, 8 // n)
        loss, cache = part.loss(own, tokens, targets)
        return loss, part.whole(cache.backward())

    for got in threads.run(n, work):
        require_same(got, (loss, cache.backward()))


def test_one_key_head_with_keys_of_distances() -> None:
    """Transformer-XL: the projection of distances to keys is on all processes, as that of x."""
    model = xf.GPT(V, 2, 12, 3, 8, n_kv_heads=1, positions="xl")
    params = tree.map(lambda p: p + 0.1, model.init(dtype="float64"))
    tokens, targets = inputs()
    loss, cache = model.loss(params, tokens, targets)

    def work(world: World) -> Any:
        part = distributed.tensor_parallel(model, world)
        loss, cache = part.loss(part.shard(params), tokens, targets)
        return loss, part.whole(cache.backward())

    for got in threads.run(3, work):
        require_same(got, (loss, cache.backward()))


# --- generation ---


PROMPTS = [[5, 6, 7, 8, 9], [3], [30, 31, 32]]


@pytest.mark.parametrize("name", FAMILIES)
def test_generation(name: str) -> None:
    model, params = causal(name)
    prompts = PROMPTS if "q, k, v" not in name and "concat" not in name else [[5, 6], [7, 8]]
    warm = generation.samplers.temperature(1.5)
    greedy = generation.generate(model, params, prompts, max_new_tokens=9)
    drawn = generation.generate(model, params, prompts, max_new_tokens=9, sampler=warm, seed=3)

    def work(world: World) -> Any:
        part = distributed.tensor_parallel(model, world)
        own, options = part.shard(params), {"max_new_tokens": 9}
        return (
            generation.generate(part, own, prompts, **options),
            generation.generate(part, own, prompts, **options, sampler=warm, seed=3),
        )

    assert threads.run(3, work) == [(greedy, drawn)] * 3


@pytest.mark.parametrize("name", ["t5", "t5 1.1"])
def test_generation_of_t5(name: str) -> None:
    model, params = seq2seq(name)
    wanted = generation.generate(model, params, PROMPTS, max_new_tokens=9)
    beams = generation.beam_search(model, params, PROMPTS, n_beams=3, max_new_tokens=6)
    ids = [[beam.ids for beam in of_prompt] for of_prompt in beams]

    def work(world: World) -> Any:
        part = distributed.tensor_parallel(model, world)
        own = part.shard(params)
        beams = generation.beam_search(part, own, PROMPTS, n_beams=3, max_new_tokens=6)
        ids = [[beam.ids for beam in of_prompt] for of_prompt in beams]
        return generation.generate(part, own, PROMPTS, max_new_tokens=9), ids

    assert threads.run(3, work) == [(wanted, ids)] * 3


def test_a_state_has_own_heads_only() -> None:
    model, params = causal("gpt2")
    tokens, _ = inputs()

    def work(world: World) -> Any:
        part = distributed.tensor_parallel(model, world, sequence=True)  # decodes whole tokens
        logits, state = part.decode(part.shard(params), tokens, part.init_state())
        return logits, state.kv_cache[0].k.shape

    wanted, _ = model.decode(params, tokens, model.init_state())
    for logits, shape in threads.run(3, work):
        np.testing.assert_allclose(logits, wanted, rtol=1e-11, atol=1e-12)
        assert shape == (2, 1, 6, 4)


# --- training ---


@pytest.mark.parametrize("sequence", [False, True], ids=["heads", "heads and sequence"])
def test_training(sequence: bool) -> None:
    """Ten steps with clipping and weight decay: the losses, norms and parameters of the whole."""
    model, params = causal("gpt2")
    batches = [inputs(seed) for seed in range(10)]
    options: Any = {"lr": 3e-3, "weight_decay": 0.1}

    whole, state, wanted = params, optim.adamw_init(params), []
    for tokens, targets in batches:
        loss, cache = model.loss(whole, tokens, targets)
        grads, norm = optim.clip_by_global_norm(cache.backward(), max_norm=1.0)
        whole, state = optim.adamw(whole, grads, state, **options)
        wanted.append((float(loss), float(norm)))

    def work(world: World) -> Any:
        part = distributed.tensor_parallel(model, world, sequence=sequence)
        own = part.shard(params)
        state, log = optim.adamw_init(own), []
        for tokens, targets in batches:
            loss, cache = part.loss(own, tokens, targets)
            grads, norm = part.clip_by_global_norm(cache.backward(), max_norm=1.0)
            own, state = optim.adamw(own, grads, state, **options)
            log.append((float(loss), float(norm)))
        return log, part.whole(own), part.whole(state)

    assert wanted[-1][0] < wanted[0][0]
    assert min(norm for _, norm in wanted) > 1  # every step was clipped
    for log, own, own_state in threads.run(3, work):
        np.testing.assert_allclose(log, wanted, rtol=1e-11)
        # Adam divides by the size of a gradient; that of the keys' bias is 0 but for rounding.
        for name, leaf in tree.flatten(own).items():
            if not name.endswith("k.b"):
                np.testing.assert_allclose(leaf, tree.flatten(whole)[name], atol=1e-9)
        assert tree.flatten(own_state).keys() == tree.flatten(state).keys()


@pytest.mark.parametrize("trained", ["*norm*", "*.o.b", "*.q.w"])
def test_clipping_where_a_process_has_little_to_count(trained: str) -> None:
    model, params = causal("gpt2")
    names = [n for n in tree.flatten(params) if not fnmatchcase(n, trained)]
    few = tree.freeze(params, *names)
    _, cache = model.loss(few, *inputs(0))
    wanted, norm = optim.clip_by_global_norm(cache.backward(), max_norm=0.01)

    def work(world: World) -> Any:
        part = distributed.tensor_parallel(model, world)
        _, cache = part.loss(part.shard(few), *inputs(0))
        clipped, norm = part.clip_by_global_norm(cache.backward(), max_norm=0.01)
        with pytest.raises(ValueError, match="there are no gradients"):
            part.clip_by_global_norm((), max_norm=0.01)
        return norm, tree.flatten(clipped)

    for rank, (found, clipped) in enumerate(threads.run(3, work)):
        assert found == pytest.approx(float(norm), rel=1e-12)
        if rank == 0 and trained != "*.q.w":  # process 0 has all of these
            for name, dp in tree.flatten(wanted).items():
                np.testing.assert_allclose(clipped[name], dp, atol=1e-12)


def test_what_all_processes_have_stays_the_same() -> None:
    """Bit for bit, since every number that they compute alike comes out of a collective."""
    model, params = causal("qwen3")
    model = dataclasses.replace(model, activation_checkpointing=True)

    def work(world: World) -> Any:
        part = distributed.tensor_parallel(model, world, sequence=True)
        own = part.shard(params)
        state = optim.adamw_init(own)
        for seed in range(3):
            _, cache = part.loss(own, *inputs(seed))
            own, state = optim.adamw(own, cache.backward(), state, lr=1e-2)
        kept = tree.flatten(own)
        return {
            n: a for n, a in kept.items() if distributed.cut_of(n, part.cuts) in ("whole", "copied")
        }

    first, *others = threads.run(3, work)
    assert any("q_norm" in name for name in first)
    assert any(name.endswith("kv.k.w") for name in first)
    for other in others:
        assert all(np.array_equal(other[name], a) for name, a in first.items())


class _Again:
    """A cache that runs all processes again for its gradients."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def backward(self, dy: NDArray[Any]) -> Any:
        return self.run(dy)


@pytest.mark.parametrize("sequence", [False, True], ids=["heads", "heads and sequence"])
@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_directional_derivatives(name: str, sequence: bool) -> None:
    """Of the loss on three processes, by finite differences of all parameters together."""
    model, params = causal(name)
    params = tree.map(lambda p: 0.3 * p, params)
    tokens, targets = inputs()

    def fn(params: Any) -> tuple[Any, Any]:
        def run(dloss: NDArray[Any] | None) -> Any:
            def work(world: World) -> Any:
                part = distributed.tensor_parallel(model, world, sequence=sequence)
                loss, cache = part.loss(part.shard(params), tokens, targets)
                return loss if dloss is None else part.whole(cache.backward(dloss))

            return threads.run(3, work)[0]

        return run(None), _Again(run)

    gradcheck(fn, params, alone=False).require()


# --- parameters ---


def test_shard_and_whole_are_inverses() -> None:
    """Of parameters, also frozen ones, and of optimiser states; on all processes."""
    model, params = causal("qwen2")
    params = tree.freeze(params, "*.attn.*", "*.down.w")
    state = optim.adamw_init(tree.trained(params))

    def work(world: World) -> Any:
        part = distributed.tensor_parallel(model, world)
        own, own_state = part.shard(params), part.shard(state)
        return own, part.whole(own), part.whole(own_state)

    found = threads.run(3, work)
    for _, whole, whole_state in found:
        for got, wanted in ((whole, params), (whole_state, state)):
            a, b = tree.flatten(got), tree.flatten(wanted)
            assert list(a) == list(b)
            for name in b:
                assert type(a[name]) is type(b[name]), name
                assert np.array_equal(tree.value(a[name]), tree.value(b[name])), name
    # Each process has a third of nearly all, in arrays of its own.
    sizes = [tree.nbytes(own) / tree.nbytes(params) for own, _, _ in found]
    assert max(sizes) < 0.45
    table = found[0][0].embed.table
    assert table.base is None or table.base.nbytes == table.nbytes


def test_init_is_the_part_of_the_wholes() -> None:
    model = xf.GPT(vocab_size=13, n_layers=1, d_model=6, n_heads=2, max_len=7)

    def work(world: World) -> Any:
        part = distributed.tensor_parallel(model, world)
        return part.whole(part.init(seed=4))

    for got in threads.run(2, work):
        require_same(got, model.init(seed=4))


@pytest.mark.parametrize(
    "head",
    [Pooler(), Classifier(3), TokenClassifier(3), Discriminator()],
    ids=lambda head: type(head).__name__,
)
def test_heads_over_labels_are_whole(head: Any) -> None:
    embed = layers.EmbedConfig(V, 12, 12, positions="none")
    attn, ffn = layers.AttentionConfig(12, 3), layers.FeedForwardConfig(20)
    model = LanguageModel(embed, (layers.BlockConfig(attn, ffn),), head=head)

    def work(world: World) -> Any:
        return distributed.tensor_parallel(model, world).init()

    for own in threads.run(3, work):
        assert tree.flatten(own.head).keys() == tree.flatten(model.init().head).keys()
        for name, leaf in tree.flatten(own.head).items():
            assert np.array_equal(leaf, tree.flatten(model.init().head)[name])


def test_no_parameter_is_whole_by_default() -> None:
    """A name that the table does not know is refused, also that of an adapter."""
    for name in ("surprise", "decoder.memory.k.w"):
        with pytest.raises(ValueError, match=f"shard: no rule says how to cut .* {name}"):
            distributed.cut_of(name)

    def work(world: World) -> Any:
        return distributed.shard({"stack": {"attn": {"q": {"base": np.ones((2, 2))}}}}, world)

    with pytest.raises(ValueError, match=r"the parameter stack\.attn\.q\.base"):
        threads.run(2, work)


def test_every_rule_is_used() -> None:
    """By a parameter of a case of the catalogue; and each of these has a rule."""
    used = set()
    for case in (*MODELS, *LAYERS):
        if OTHER_ATTENTION in (REFUSED | REFUSED_BLOCKS).get(case.name, ""):
            continue
        _, args = case.build(NUMPY)
        params = args[0] if case.group == "models" else args[1]
        for name in tree.flatten(params):
            if "memory." not in name:  # of a projection for all layers, which is refused
                used.add(next(p for p in distributed.CUTS if fnmatchcase(f".{name}", p)))
    assert used == distributed.CUTS.keys()
    assert not used & distributed.ONE_KEY_HEAD.keys()  # in a union CUTS would win


# --- what is refused ---


def gpt(**options: Any) -> Any:
    return xf.GPT(
        **{"vocab_size": V, "n_layers": 1, "d_model": 12, "n_heads": 4, "max_len": 8} | options
    )


def of_block(**options: Any) -> Any:
    attn = layers.AttentionConfig(12, 4, **options)
    block = layers.BlockConfig(attn, layers.FeedForwardConfig(12))
    return LanguageModel(layers.EmbedConfig(V, 12, 12, positions="none"), (block,))


@pytest.mark.parametrize(
    ("model", "n", "message"),
    [
        (gpt(), 3, "3 processes must divide n_heads = 4"),
        (gpt(n_kv_heads=2), 4, "4 processes must divide n_kv_heads = 2"),
        (gpt(d_ff=3), 4, "4 processes need as many hidden units, got d_ff = 3"),
        (gpt(vocab_size=3), 4, "4 processes need as many tokens, got vocab_size = 3"),
        (of_block(qk_norm="all"), 2, 'attn.qk_norm must be None or "head", got "all"'),
        (of_block(output="bias"), 2, "attn.output must be \"linear\", .* got 'bias'"),
    ],
)
def test_refused(model: Any, n: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^parallel: {message}"):
        threads.run(n, lambda world: distributed.tensor_parallel(model, world))
    threads.run(1, lambda world: distributed.tensor_parallel(model, world))  # alone it is whole


def test_refused_sequences() -> None:
    tokens = np.zeros((1, 5), int)

    def work(world: World) -> Any:
        part = distributed.tensor_parallel(gpt(), world, sequence=True)
        return part.forward(part.init(), tokens)

    with pytest.raises(ValueError, match=r"^parallel: 2 processes must divide the 5 tokens"):
        threads.run(2, work)
    config = layers.BlockConfig(layers.AttentionConfig(12, 4), layers.FeedForwardConfig(12))
    for model, message in (
        (EncoderDecoder((config,), (config,)), "needs a LanguageModel"),
        (LanguageModel(None, (config,), head=None), "needs an embedding"),
    ):
        with pytest.raises(ValueError, match=f"^parallel: sequence = True {message}"):
            threads.run(
                2, lambda world, m=model: distributed.tensor_parallel(m, world, sequence=True)
            )


def test_dropout_outside_the_sublayers_is_that_of_the_whole() -> None:
    config = layers.BlockConfig(
        layers.AttentionConfig(12, 4), layers.FeedForwardConfig(12), dropout=0.3
    )
    embed = layers.EmbedConfig(V, 12, 12, positions="none", dropout=0.2)
    model = LanguageModel(embed, (config,) * 2, out_dropout=0.1)
    params, key = model.init(dtype="float64"), xf.RandomKey(seed=1, step=2)
    tokens, targets = inputs()
    loss, cache = model.loss(params, tokens, targets, dropout_key=key)

    def work(world: World) -> Any:
        part = distributed.tensor_parallel(model, world)
        loss, cache = part.loss(part.shard(params), tokens, targets, dropout_key=key)
        return loss, part.whole(cache.backward())

    for got in threads.run(2, work):
        require_same(got, (loss, cache.backward()))


def test_no_kernel_of_all_layers_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could run collectives in several threads, or leave them out."""

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a kernel of all layers ran")

    model, params = causal("gpt2")
    tokens, targets = inputs()
    NUMPY.asarray(0.0)
    for op in (blocks, advance):
        op.import_kernels("numpy")
        monkeypatch.setitem(op.kernels, "numpy", [Kernel(broken, "numpy", None)])

    def work(world: World) -> Any:
        part = distributed.tensor_parallel(model, world)
        own = part.shard(params)
        part.loss(own, tokens, targets)
        return generation.generate(part, own, [[1, 2]], max_new_tokens=2)

    threads.run(3, work)
    with pytest.raises(AssertionError):
        model.loss(params, tokens, targets)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_other_libraries(library: str) -> None:
    pytest.importorskip(library)
    backend = backends.get(library)
    model, params = causal("llama")
    tokens, targets = inputs()
    loss, cache = model.loss(params, tokens, targets)
    with backend.active():
        moved: Any = tree.map(lambda p: backend.asarray(p), params)
        data = [backend.asarray(a) for a in (tokens, targets)]

        def work(world: World) -> Any:
            part = distributed.tensor_parallel(model, world, sequence=True)
            loss, cache = part.loss(part.shard(moved), *data)
            return tree.map(backend.to_numpy, (loss, part.whole(cache.backward())))

        for got in threads.run(3, work):
            require_same(got, (loss, cache.backward()))
