"""Heads of encoders: options that do not fit together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from xformer.layers import NormConfig
from xformer.models import Classifier, TokenClassifier


@pytest.mark.parametrize("head", [Classifier, TokenClassifier])
@pytest.mark.parametrize("options", [{"norm": NormConfig()}, {"dense_bias": False}])
def test_options_of_a_dense_layer_that_is_missing(head: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{head.__name__}: norm and dense_bias need dense, got"):
        head(3, dense=None, **options)


@pytest.mark.parametrize("head", [Classifier, TokenClassifier])
def test_bad_names(head: Any) -> None:
    with pytest.raises(ValueError, match=r"must be one of .*did you mean gelu"):
        head(3, dense="gleu")
    with pytest.raises(ValueError, match=r"^Classifier: token must be one of mean, .*got 'middle'"):
        Classifier(3, token="middle")


@pytest.mark.parametrize("head", [Classifier, TokenClassifier])
def test_parameters_of_another_head(head: Any) -> None:
    from xformer import backends

    x, rng = np.ones((2, 4, 6)), backends.get("numpy").generator(0, "float64")
    modern = head(3, dense="gelu", norm=NormConfig())
    for name in ("dense", "norm"):
        params = modern.init(rng, 6, None)._replace(**{name: None})
        with pytest.raises(ValueError, match=rf"{head.__name__}: params\.head\.{name} must be"):
            modern.forward(x, params, None)
