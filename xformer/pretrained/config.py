"""A model's config.json, read key by key. Keys that nobody reads are refused, or reported."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from xformer.base.choices import did_you_mean
from xformer.pretrained.reading import PretrainedError, listed

REQUIRED: Any = object()  # the default of a required key
MAX = (1 << 31) - 1
MAX_ITEMS = 10_000
FLOAT_MAX = sys.float_info.max

# Keys that do not change what a forward computes: the origin of a model, options of generation, the
# format of outputs. As transformers 2 to 5 write them.
HARMLESS = (
    *("_name_or_path", "name_or_path", "architectures", "model_type", "transformers_version"),
    *("_commit_hash", "_num_labels", "finetuning_task", "language", "license", "tokenizer_class"),
    *("dtype", "torch_dtype", "torchscript", "use_bfloat16", "xla_device", "tf_legacy_loss"),
    *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation"),
    *("_flash_attn_2_enabled", "_experts_implementation", "experts_implementation"),
    *("id2label", "label2id", "num_labels", "problem_type", "task_specific_params", "prefix"),
    *("initializer_range", "initializer_factor", "gradient_checkpointing"),
    *("chunk_size_feed_forward", "use_cache", "cache_implementation", "cache_config"),
    *("output_attentions", "output_hidden_states", "output_past", "output_scores"),
    *("output_logits", "return_dict", "use_return_dict", "return_dict_in_generate"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id"),
    *("eos_token_ids",),
    *("mask_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"),
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time"),
    *("do_sample", "early_stopping", "num_beams", "num_beam_groups", "num_return_sequences"),
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("repetition_penalty", "encoder_repetition_penalty", "length_penalty"),
    *("diversity_penalty", "exponential_decay_length_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "suppress_tokens"),
    *("begin_suppress_tokens", "renormalize_logits", "remove_invalid_values"),
    *("transformers.js_config", "sentence_transformers", "sbert_ce_default_activation_function"),
)

# Keys that could change what the model computes -> the value at which they change nothing.
NEUTRAL: dict[str, Any] = {
    "is_decoder": False,
    "is_encoder_decoder": False,
    "tie_encoder_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "pruned_heads": {},
}

# A family reads every key that transformers reads for its models (`test_pretrained_keys`). The
# other keys cannot change what transformers computes, except for these, which code shared by all
# families of transformers reads: weights in another format or place, layers that differ, masks,
# parts of a larger model.
READ = (
    *("quantization_config", "compression_config", "transformers_weights", "fusion_config"),
    *("per_layer_config", "layer_types", "kv_sharing_modes", "number_of_conv_states"),
    *("sliding_window", "attention_chunk_size", "is_causal"),
    *("text_config", "text_encoder", "decoder", "generator", "sub_configs"),
    *("attribute_map", "default_theta", "default_rope_type"),
)
NOTHING: dict[str, tuple[Any, ...]] = {"is_causal": (True,)}  # values that change nothing


class Config:
    """One JSON object of a configuration.

    where: the file and the path of the object in it, for messages.
    tensors: the names of the tensors in a model's files, which for some families alone show which
        parts a model has; None: unknown.

    Each reader takes the name of a key and returns its checked value. It returns `default` if the
    key is missing, and `null` if its value is null (`absent` are these two). `null` is the same as
    `default` unless given; transformers distinguishes the two for some keys. Call `finish` last: it
    refuses the keys that were not read. All methods raise PretrainedError.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        where: str = "config.json",
        tensors: Collection[str] | None = None,
    ) -> None:
        self.where, self.tensors = where, tensors
        self.data = data
        self._asked: set[str] = set()
        self._parts: dict[str, Config] = {}
        self._called: dict[str, str] = {}  # renamed key -> its name in the file

    def __contains__(self, name: str) -> bool:
        """Whether the key is present and its value is not null."""
        return self.data.get(name) is not None

    def integer(self, name: str, *, low: int = 0, high: int = MAX, **absent: Any) -> Any:
        """An int in [low, high]."""
        return self._read(name, _integer(low, high), **absent)

    def number(
        self, name: str, *, low: float = -math.inf, high: float = math.inf, **absent: Any
    ) -> Any:
        """A float in [low, high]. An integer in the file is accepted."""
        return self._read(name, _number(low, high), **absent)

    def flag(self, name: str, *, default: Any = REQUIRED, null: Any = False) -> Any:
        """A bool. null is False, because transformers tests it as such, unless default is None."""
        return self._read(name, _flag, default, None if default is None else null)

    def text(self, name: str, *, choices: Sequence[str] = (), **absent: Any) -> Any:
        """A string. It must be one of `choices` if there are any."""
        return self._read(name, _text(choices), **absent)

    def integers(self, name: str, *, low: int = 0, high: int = MAX, **absent: Any) -> Any:
        """A tuple of ints in [low, high]."""
        return self._read_list(name, "integers", _integer(low, high), None, **absent)

    def numbers(self, name: str, *, length: int | None = None, **absent: Any) -> Any:
        """A tuple of floats, of `length` items if it is given."""
        numbers = _number(-math.inf, math.inf)
        return self._read_list(name, "numbers", numbers, length, **absent)

    def texts(
        self, name: str, *, choices: Sequence[str] = (), length: int | None = None, **absent: Any
    ) -> Any:
        """A tuple of strings, of `length` items if it is given.

        Each string must be one of `choices` if there are any.
        """
        return self._read_list(name, "strings", _text(choices), length, **absent)

    def sub(self, name: str) -> Config | None:
        """The object under a key; None if the key is missing. `finish` also checks the object."""
        if name not in self._parts:
            data = self._read(name, _object, None)
            if data is None:
                return None
            self._parts[name] = Config(data, f"{self.where}: {name}")
        return self._parts[name]

    def only(self, name: str, *values: Any) -> None:
        """Refuse the key unless it has one of these values, is null or is missing.

        If the values are flags, null is False.
        """
        value = self.data.get(name)
        self._asked.add(name)
        if value is None and name in self.data and values and set(map(type, values)) == {bool}:
            value = False
        same = [v for v in values if v == value and isinstance(v, bool) == isinstance(value, bool)]
        if value is not None and not same:
            raise self.refused(name, " or ".join(repr(v) for v in values) or "null")

    def ignore(self, *names: str) -> None:
        """Accept these keys at any value."""
        self._asked.update(names)

    def unread(self, name: str, *values: Any) -> None:
        """Accept a key that transformers does not read, without a warning, at these values."""
        if self.data.get(name) in values:
            self._asked.add(name)

    def rename(self, names: Mapping[str, str]) -> None:
        """Read keys under another name: `names` maps the name in the file to the family's name.

        PretrainedError if the file has both with different values.
        """
        for name, key in names.items():
            if name in self:
                if key in self:
                    self.only(name, self.data[key])
                self._asked.add(name)
                self._called[key] = name
                self.data = {**self.data, key: self.data[name]}

    def common(self, **required: Any) -> None:
        """Check the keys common to all families: ignore HARMLESS keys, require NEUTRAL values.

        required: other required values for NEUTRAL keys: `common(is_encoder_decoder=True)`.
        """
        self.ignore(*HARMLESS)
        for name, value in (NEUTRAL | required).items():
            self.only(name, value)

    def labels(self) -> int:
        """The number of classes of a classifier: the size of `id2label`, or `num_labels`, or 2.

        The keys of `id2label` must be the numbers from 0 on, because transformers looks up names by
        class.
        """
        names = self._read("id2label", _object, None)
        count = self.integer("num_labels", low=1, high=MAX_ITEMS, default=None)
        if names is None:
            return 2 if count is None else int(count)
        if not 1 <= len(names) <= MAX_ITEMS or count not in (None, len(names)):
            raise self.refused("id2label", f"an object of {count or f'1 to {MAX_ITEMS}'} names")
        keys = {str(key) for key in names}
        if keys != {str(i) for i in range(len(names))}:
            raise PretrainedError(
                f"{self.where}: the keys of id2label must be 0 to {len(names) - 1}, "
                f"got {listed(keys)}"
            )
        return len(names)

    def finish(self) -> None:
        """PretrainedError that lists the keys which were not read and are not null, if any."""
        if unknown := self._unknown():
            raise PretrainedError(f"{self.where}: not supported: {listed(unknown)}")
        for part in self._parts.values():
            part.finish()

    def unasked(self) -> list[str]:
        """The keys that were not read. The keys of a part are "part.key"."""
        of_parts = (f"{name}.{key}" for name, part in self._parts.items() for key in part.unasked())
        return [*self._unknown(), *of_parts]

    def accept(self, names: Iterable[str]) -> None:
        """Accept keys at any value; names are as in `unasked`."""
        for name in names:
            part, _, key = name.partition(".")
            if name in self.data:
                self._asked.add(name)
            elif part in self._parts:
                self._parts[part].accept([key])

    def refused(self, name: str, wanted: str, near: str = "") -> PretrainedError:
        """The error for a value that cannot be used. near: as of `did_you_mean`."""
        value, name = self.data.get(name), self._called.get(name, name)
        return PretrainedError(f"{self.where}: {name} must be {wanted}, got {value!r:.100}{near}")

    def _unknown(self) -> list[str]:
        return [k for k, v in self.data.items() if k not in self._asked and v is not None]

    def _read(
        self,
        name: str,
        check: Callable[[Any], Any],
        default: Any = REQUIRED,
        null: Any = REQUIRED,
    ) -> Any:
        self._asked.add(name)
        value = self.data.get(name)
        if value is None:
            value = null if name in self.data and null is not REQUIRED else default
            if value is REQUIRED:
                raise PretrainedError(f"{self.where}: {name} is missing")
            return value
        try:
            return check(value)
        except ValueError as error:
            raise self.refused(name, *error.args) from None

    def _read_list(
        self,
        name: str,
        kind: str,
        check: Callable[[Any], Any],
        length: int | None,
        **absent: Any,
    ) -> Any:
        def items(value: Any) -> tuple[Any, ...]:
            wanted = f"a list of {f'at most {MAX_ITEMS}' if length is None else length} {kind}"
            if not isinstance(value, list):
                raise ValueError(wanted)
            if len(value) > MAX_ITEMS or length not in (None, len(value)):
                raise ValueError(wanted)
            return tuple(check(item) for item in value)

        return self._read(name, items, **absent)


# Checks of a value: each returns it, or raises ValueError with a description of valid values.


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"an integer from {low} to {high}")
        return value

    return check


def _number(low: float, high: float) -> Callable[[Any], float]:
    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError("a number")
        if not max(low, -FLOAT_MAX) <= value <= min(high, FLOAT_MAX):
            raise ValueError(f"a number from {low:g} to {high:g}")
        return float(value)

    return check


def _text(choices: Sequence[str]) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if not isinstance(value, str) or (choices and value not in choices):
            wanted = f"one of {', '.join(choices)}" if choices else "a string"
            raise ValueError(wanted, did_you_mean(value, choices))
        return value

    return check


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("an object")
    return value


def unread_keys(c: Config) -> list[str]:
    """The keys that transformers does not read. They become accepted in `c`.

    `finish` refuses the other keys that the family did not read.
    """
    unasked = c.unasked()
    c.accept(name for name in unasked if name not in READ or _says_nothing(c, name))
    return [name for name in unasked if name not in READ]


def warn_of(unread: list[str], where: str, reader: str = "transformers") -> None:
    """Warn of the keys that are ignored because `reader` does not read them."""
    if unread:
        names = listed(unread)
        message = f"{where}: keys that {reader} does not read are left out: {names}"
        warnings.warn(message, stacklevel=3)


def _says_nothing(c: Config, name: str) -> bool:
    value = c.data[name]
    if name == "layer_types":
        return isinstance(value, list) and all(kind == "full_attention" for kind in value)
    return value in (*NOTHING.get(name, ()), {}, [])
