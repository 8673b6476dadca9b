"""The one type the mathematics is written against."""

from typing import Any, TypeAlias

Array: TypeAlias = Any
"""An array of any library that `array_api_compat.array_namespace` understands."""
