"""Proofs: derivatives by numbers, cases of every op, layer and model, digits, other libraries.

- `gradcheck`: gradients beside numerical or exact derivatives
- `catalogue`: inputs and options that everything is compared on
- `digits`: errors of float64, measured with numbers of 50 digits
- `foreign`: which functions of the array API are called, and what an array library returns
"""

from typing import TYPE_CHECKING

from xformer.base.lazy import later

if TYPE_CHECKING:
    from xformer.proofs import catalogue as catalogue
    from xformer.proofs import digits as digits
    from xformer.proofs import foreign as foreign
    from xformer.proofs.gradcheck import GradientError as GradientError
    from xformer.proofs.gradcheck import gradcheck as gradcheck

later(__name__)
