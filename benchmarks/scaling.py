"""`python -m benchmarks.scaling`: the time of a training step on 8, 64, 512 GPUs, by a cost model.

Nothing is measured and no process is started. The FLOPs and the saved bytes of the model are this
library's own (`summary` and `measure` of `xformer.inspection`); the rest is arithmetic on the
assumptions that the command prints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import command, report
from benchmarks.embeddings_page import END
from xformer import pretrained
from xformer.cli.summary import inspected
from xformer.inspection.measure import saved_by_part
from xformer.inspection.summary import LENGTH, context, summary
from xformer.models import LanguageModel
from xformer.plots import save
from xformer.plots.style import COLOURS, panels, styled
from xformer.pretrained import PretrainedError

BEGIN = "<!-- scaling -->\n"
GPUS = (8, 64, 512)
WEIGHT, GRADIENT, STATE = 2, 4, 12  # bytes of a parameter: bfloat16; float32; three of float32
ACTIVATION = 2  # bytes of a number: bfloat16
ALL_REDUCES = 4  # of tensor parallelism in a layer: two forward, two backward


class Hardware(NamedTuple):
    """A cluster. Bandwidths in bytes a second, as collectives reach them ("bus bandwidth")."""

    name: str = "H100 SXM, 8 in a node, 400 Gb/s each between nodes"
    peak: float = 989.4e12  # FLOPs a second in bfloat16
    used: float = 0.45  # of the peak, by the FLOPs of the model without recomputation
    memory: float = 80e9
    node: int = 8
    inside: float = 370e9  # a GPU's, in collectives within a node
    across: float = 330e9  # in collectives over whole nodes, whose GPUs share the links
    link: float = 45e9  # from one GPU to one of another node


class Work(NamedTuple):
    """What a model asks for. Bytes are of one sequence, in bfloat16, without parallelism."""

    name: str
    n_params: int
    n_layers: int
    n_heads: int  # the number of GPUs of tensor parallelism divides it
    width: int
    length: int  # tokens of a sequence
    flops: float  # of forward and backward, for a token
    kept: float  # saved by a layer with activation checkpointing: its input
    block: float  # saved by a layer when it is computed again
    head: float  # saved by the head and the loss


class Plan(NamedTuple):
    """The number of GPUs for each kind of parallelism; their product is the number of GPUs."""

    data: int
    tensor: int
    pipeline: int

    @property
    def name(self) -> str:
        """The kinds that are used, with their numbers."""
        used = [f"{kind} {n}" for kind, n in self._asdict().items() if n > 1]
        return " x ".join(used) or "one GPU"


class Cost(NamedTuple):
    """Seconds of a step, nothing overlapped, and bytes on a GPU."""

    plan: Plan
    compute: float
    tensor: float  # all-reduces of activations
    pipeline: float  # GPUs that wait at both ends of a step, and sent activations
    data: float  # gradients, and the updated weights
    states: float  # weights, gradients, and the optimiser's share
    activations: float

    @property
    def step(self) -> float:
        """The seconds of a step."""
        return self.compute + self.tensor + self.pipeline + self.data

    @property
    def memory(self) -> float:
        """The bytes on a GPU."""
        return self.states + self.activations

    def fits(self, hardware: Hardware) -> bool:
        """Whether a GPU has the memory, with a tenth left for buffers and fragments."""
        return self.memory <= 0.9 * hardware.memory


def assumptions(hardware: Hardware) -> str:
    """A text of what the model assumes."""
    used = f"{100 * hardware.used:.0f} %"
    inside, across, link = (f"{x / 1e9:.0f}" for x in hardware[-3:])
    return f"""\
- Hardware: {hardware.name}.
  {used} of {hardware.peak / 1e12:.0f} TFLOP/s under every plan.
  {inside} GB/s for collectives within a node, {across} over whole nodes,
  {link} from one GPU to one of another node.
- A GPU has the same number of tokens a step under every plan, and a micro-batch is one sequence.
- bfloat16 weights and activations, float32 gradients, AdamW's float32 weights and two moments:
  {WEIGHT}, {GRADIENT} and {STATE} bytes a parameter. The last {STATE} are shared by the GPUs of
  data parallelism (ZeRO-1).
- Activation checkpointing: each layer keeps its input, one layer at a time is computed again. This
  time is in the {used}. With tensor parallelism a layer also keeps the results of its two
  all-reduces.
- Tensor parallelism: within a node, {ALL_REDUCES} all-reduces of the hidden states in a layer.
- Pipeline: 1F1B. Layers, embedding and head are divided equally. A GPU waits for
  (stages - 1) / micro-batches of the time it works.
- Data parallelism: one reduce-scatter of the gradients and one all-gather of the weights in a step.
- Nothing is overlapped, so the times of communication are upper bounds. Latency, the optimiser,
  stragglers and reading data cost nothing.
- A plan fits if it needs at most 90 % of {hardware.memory / 1e9:.0f} GB."""


def work(name: str, model: Any, length: int | None = None) -> Work:
    """The work of a decoder, whose last layer stands for all. ValueError for another model."""
    if not isinstance(model, LanguageModel):
        raise ValueError(f"{name}: must be a decoder, got {type(model).__name__}")
    if length is None:
        length = context(model) or LENGTH
    total = summary(model, batch=1, length=length)

    def saved(**options: Any) -> dict[str, int]:
        changed = dataclasses.replace(model, **options)
        return saved_by_part(changed, 1, length, "float32")

    blocks = model.blocks
    attn = blocks[-1].attn
    in_bytes = ACTIVATION / 4  # of float32
    lean, full = saved(activation_checkpointing=True), saved(activation_checkpointing=False)
    last = f"layer {len(blocks) - 1}"
    return Work(
        name,
        total.n_params,
        len(blocks),
        attn.n_kv_heads or attn.n_heads,
        attn.d_model,
        length,
        total.flops.training,
        in_bytes * lean[last],
        in_bytes * full[last],
        in_bytes * (full.get("head", 0) + full.get("loss", 0)),
    )


def plans(load: Work, hardware: Hardware, n_gpus: int, tokens: int) -> Iterator[Plan]:
    """Every plan of powers of two that divides the model, the GPUs and the tokens."""
    for tensor in _powers(min(hardware.node, n_gpus)):
        for pipeline in _powers(n_gpus // tensor):
            divides = load.n_heads % tensor == 0 and load.n_layers % pipeline == 0
            if divides and tokens * tensor * pipeline % load.length == 0:
                yield Plan(n_gpus // (tensor * pipeline), tensor, pipeline)


def _powers(most: int) -> Iterator[int]:
    n = 1
    while n <= most:
        yield n
        n *= 2


def cost(load: Work, hardware: Hardware, plan: Plan, tokens: int) -> Cost:
    """The cost of a step. tokens: of a GPU; a group of tensor and pipeline shares its tokens."""
    data, tensor, pipeline = plan
    n_gpus = data * tensor * pipeline
    group_tokens = tokens * tensor * pipeline
    micro_batches = group_tokens // load.length
    layers = load.n_layers / pipeline
    params = load.n_params / (tensor * pipeline)
    hidden = ACTIVATION * load.width  # bytes of a token's hidden state

    compute = tokens * load.flops / (hardware.used * hardware.peak)
    moved = 2 * (tensor - 1) / tensor * hidden * group_tokens  # by an all-reduce
    reducing = ALL_REDUCES * layers * moved / hardware.inside
    waiting = (compute + reducing) * (pipeline - 1) / micro_batches
    link = hardware.inside if n_gpus <= hardware.node else hardware.link
    sending = 2 * hidden * group_tokens / tensor / link if pipeline > 1 else 0.0
    shared = (data - 1) / data * (GRADIENT + WEIGHT) * params
    at_once = min(micro_batches, pipeline)  # micro-batches whose activations are kept
    kept = load.kept + (2 * hidden * load.length if tensor > 1 else 0)
    return Cost(
        plan,
        compute,
        reducing,
        waiting + sending,
        shared / _data_bandwidth(hardware, plan),
        (WEIGHT + GRADIENT + STATE / data) * params,
        at_once * layers * kept + (load.block + load.head) / tensor,
    )


def _data_bandwidth(hardware: Hardware, plan: Plan) -> float:
    """A GPU's, in collectives of data parallelism. Groups that cross nodes share the links."""
    if plan.data * plan.tensor <= hardware.node:
        return hardware.inside
    return hardware.across * (hardware.node // plan.tensor) / hardware.node


def exact_sums(load: Work, hardware: Hardware, n_gpus: int) -> tuple[float, float]:
    """Seconds of data parallelism whose sums have the same bits for any number of GPUs.

    Gradients are exchanged (all-to-all) and added as a tree. The first figure is of two levels,
    within a node and then between nodes, the second of one level over all GPUs.
    """
    node = min(hardware.node, n_gpus)
    nodes = n_gpus // node
    gradients, weights = GRADIENT * load.n_params, WEIGHT * load.n_params
    across = hardware.inside if nodes == 1 else hardware.across
    gather = (n_gpus - 1) / n_gpus * weights / across
    inside = (node - 1) / node * gradients / hardware.inside
    between = (nodes - 1) / nodes * gradients / node / hardware.link
    if nodes == 1:
        return inside + gather, inside + gather
    return inside + between + gather, (n_gpus - node) / n_gpus * gradients / hardware.link + gather


def chosen(load: Work, hardware: Hardware, n_gpus: int, tokens: int) -> list[Cost]:
    """The fastest plan of each combination of kinds that fits; if none does, the smallest one."""
    kinds: dict[tuple[bool, ...], list[Cost]] = {}
    for plan in plans(load, hardware, n_gpus, tokens):
        kind = tuple(n > 1 for n in plan)
        kinds.setdefault(kind, []).append(cost(load, hardware, plan, tokens))
    best = []
    for costs in kinds.values():
        fitting = [c for c in costs if c.fits(hardware)]
        best.append(min(fitting, key=lambda c: c.step) if fitting else smallest(costs))
    return sorted(best, key=lambda c: (not c.fits(hardware), c.step))


def smallest(costs: Sequence[Cost]) -> Cost:
    """The plan that needs the least memory on a GPU."""
    return min(costs, key=lambda c: c.memory)


def text(load: Work, hardware: Hardware, gpus: Sequence[int], tokens: int) -> str:
    """The table of a model, in Markdown."""
    head = ["plan", "memory, GB", "step, s", "compute", "tensor", "pipeline", "data", "tokens/s"]
    lines = [
        f"**{load.name}**: {load.n_params / 1e9:.2f} billion parameters, sequences of "
        f"{load.length:,} tokens, {tokens:,} tokens a GPU."
    ]
    for n_gpus in gpus:
        rows = [[f"{n_gpus} GPUs: {head[0]}", *head[1:]]]
        for c in chosen(load, hardware, n_gpus, tokens):
            parts = [f"{part / c.step:.1%}" for part in (c.compute, c.tensor, c.pipeline, c.data)]
            memory = f"{c.memory / 1e9:.1f}" + ("" if c.fits(hardware) else " (too much)")
            speed = f"{n_gpus * tokens / c.step:,.0f}"
            rows.append([c.plan.name, memory, f"{c.step:.3g}", *parts, speed])
        lines.append(report.align(rows))
    two, one = exact_sums(load, hardware, gpus[-1])
    lines.append(
        f"Sums with the same bits for any number of GPUs, by data parallelism on {gpus[-1]} GPUs:\n"
        f"{two:.3g} s a step in two levels, {one:.3g} s in one."
    )
    return "\n\n".join(lines)


@styled()
def draw(
    loads: Sequence[Work], hardware: Hardware, gpus: Sequence[int], tokens: int, path: Path
) -> Path:
    """Draw bars: what the time of a step consists of, for each model, plan and number of GPUs."""
    from matplotlib.patches import Patch

    figure, axes = panels(len(loads), len(gpus), (4.6 * len(gpus), 2.7 * len(loads)))
    parts = ("compute", "tensor", "pipeline", "data")
    for row, load in zip(axes, loads, strict=True):
        for panel, n_gpus in zip(row, gpus, strict=True):
            costs = chosen(load, hardware, n_gpus, tokens)
            names = [c.plan.name + ("" if c.fits(hardware) else ": too large") for c in costs]
            left = [0.0] * len(costs)
            for part, colour in zip(parts, COLOURS, strict=False):
                widths = [getattr(c, part) for c in costs]
                shades = [1.0 if c.fits(hardware) else 0.3 for c in costs]
                bars = panel.barh(range(len(costs)), widths, left=left, color=colour, label=part)
                for bar, shade in zip(bars, shades, strict=True):
                    bar.set_alpha(shade)
                left = [a + b for a, b in zip(left, widths, strict=True)]
            panel.set_yticks(range(len(costs)), names)
            panel.invert_yaxis()
            panel.grid(axis="y", visible=False)
            panel.set(title=f"{load.name}, {n_gpus} GPUs", xlabel="seconds a step")
    handles = [Patch(color=colour) for colour in COLOURS[: len(parts)]]
    figure.legend(handles, parts, loc="outside upper center", ncols=len(parts))
    return save(figure, path)


def _llama(width: int, hidden: int, n_layers: int, n_heads: int, n_kv_heads: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": hidden,
        "max_position_embeddings": 4096,
        "num_attention_heads": n_heads,
        "num_hidden_layers": n_layers,
        "num_key_value_heads": n_kv_heads,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    }


MODELS = {
    "Llama-2-7B": _llama(4096, 11008, 32, 32, 32),
    "Llama-2-70B": _llama(8192, 28672, 80, 64, 8),
}


def opened(name: str) -> Any:
    """A model of `MODELS`, or of a folder, whose weights are not read."""
    if name in MODELS:
        return pretrained.model(MODELS[name])
    model, _ = inspected(Path(name))
    return model


def main(argv: Sequence[str] | None = None) -> int:
    """Print assumptions and tables; with --page write them to a page, with --picture draw."""
    parser = command.parser("benchmarks.scaling", __doc__)
    parser.add_argument(
        "--model",
        action="append",
        metavar="MODEL",
        help=f"{', '.join(MODELS)}, or a folder of a model; repeatable (default: both)",
    )
    parser.add_argument("--seq-len", type=int, help="tokens of a sequence (default: the context)")
    parser.add_argument(
        "--tokens", type=int, default=65536, help="of a GPU in a step (default: %(default)s)"
    )
    parser.add_argument("--page", type=Path, metavar="FILE.md", help="put the tables there")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="needs the extra plot")
    args = parser.parse_args(argv)
    if args.page is not None:
        report.around(args.page, BEGIN, END)
    hardware = Hardware()
    try:
        loads = [work(Path(m).name, opened(m), args.seq_len) for m in args.model or MODELS]
    except (OSError, PretrainedError, ValueError) as error:
        parser.error(f"--model: {error}")
    for load in loads:
        if args.tokens < load.length or args.tokens % load.length:
            parser.error(
                f"--tokens: must be a multiple of {load.length}, a sequence of {load.name}, "
                f"got {args.tokens}"
            )
    tables = "\n\n".join(text(load, hardware, GPUS, args.tokens) for load in loads)
    shown = f"{assumptions(hardware)}\n\n{tables}\n"
    print(shown, end="")
    if args.page is not None:
        report.put(args.page, BEGIN, END, shown)
    if args.picture is not None:
        draw(loads, hardware, GPUS, args.tokens, args.picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
