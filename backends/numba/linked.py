"""Compile functions that only compiled functions call, without machine code for each.

numba optimises every function and makes machine code of it, with wrappers for Python and C, even if
only other compiled functions call it. Here the LLVM code of such a function is linked into its
callers, and only they become machine code: first calls take two thirds of the time.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.registry import CPUDispatcher
from numba.core.typed_passes import NativeLowering


class Function(CPUDispatcher):  # type: ignore[misc]
    """A compiled function. Called from Python it is as numba's; compiled callers link it in."""

    @functools.cached_property
    def linked(self) -> _Linked:
        """The form for compiled callers."""
        options = self.targetoptions | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        return _Linked(self.py_func, targetoptions=options, pipeline_class=_Compiler)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        return self.linked.get_call_template(args, kws)

    def get_overload(self, sig: Any) -> Any:
        return self.linked.get_overload(sig)


class _Linked(CPUDispatcher):  # type: ignore[misc]
    """A function that Python does not call. Literal arguments do not make versions of their own."""

    def get_call_template(self, args: Any, kws: Any) -> Any:
        return super().get_call_template(tuple(map(types.unliteral, args)), kws)

    def add_overload(self, cres: Any) -> None:
        self.overloads[tuple(cres.signature.args)] = cres


class _Library(JITCodeLibrary):  # type: ignore[misc]
    """The LLVM code of a function and of its callees, optimised once and never run."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        # Loops that are inlined before they are vectorised can be slower: GELU by 7 %.
        manager, builder = self._codegen._module_pass_manager()
        manager.run(self._final_module, builder)

    def _finalize_final_module(self) -> None:
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _Lowering(NativeLowering):  # type: ignore[misc]
    """numba's pass from typed code to LLVM code, into a `_Library`."""

    _name = "linked_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = _Library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        key = object()  # by which callers find the function
        state.targetctx.insert_user_function(key, state.cr.fndesc, [state.library])
        state.cr = state.cr._replace(cfunc=key)
        return True


class _Compiler(CompilerBase):  # type: ignore[misc]
    """numba's compiler, with `_Lowering`."""

    def define_pipelines(self) -> Any:
        manager = DefaultPassBuilder.define_nopython_pipeline(self.state, name="linked")
        manager.passes = [
            (_Lowering if step is NativeLowering else step, description)
            for step, description in manager.passes
        ]
        manager._finalized = False
        manager.finalize()
        return [manager]
