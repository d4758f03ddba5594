"""Errors of the command line. See ``cgcompile/errors/__init__.py``."""

from collections.abc import Sequence

from cgcompile.errors.root import CGCompileError, close, listed


class CommandError(CGCompileError, ValueError):
    """Words of the command line that say nothing that could be done."""

    @classmethod
    def target_form(cls, target: str) -> "CommandError":
        return cls(
            f"{target!r} is no target; expected module:function or path/to/file.py:function.\n"
            "  The function takes nothing and returns a model and its inputs: (model, args)."
        )

    @classmethod
    def no_module(cls, name: str, why: str) -> "CommandError":
        return cls(
            f"cannot import {name!r}: {why}.\n"
            "  Give a module that Python finds from here, or the path of a file: "
            "path/to/file.py:function."
        )

    @classmethod
    def no_function(cls, module: str, name: str, known: Sequence[str]) -> "CommandError":
        return cls(
            f"{module} has no function {name!r}.{close(name, known)}\n  Functions: {listed(known)}."
        )

    @classmethod
    def takes_arguments(cls, target: str, signature: str) -> "CommandError":
        return cls(
            f"{target} takes arguments, {signature}; expected a function that takes nothing.\n"
            "  Give one that makes the model and its inputs: "
            "def make(): return Model(), (torch.randn(8, 16),)"
        )

    @classmethod
    def bad_result(cls, target: str, found: str) -> "CommandError":
        return cls(
            f"{target} returned {found}; expected a model and its inputs.\n"
            "  Return (model, args), (model, args, kwargs) or a dict with 'model', 'args' and "
            "'kwargs'; args is a tuple, or one tensor."
        )

    @classmethod
    def no_inputs(cls, target: str, command: str) -> "CommandError":
        return cls(
            f"{target} returned a model without inputs, and {command} calls it.\n"
            "  Return (model, args) or (model, args, kwargs)."
        )

    @classmethod
    def bad_setting(cls, given: str) -> "CommandError":
        return cls(f"--set {given}: expected key=value, such as --set compiler=eager.")

    @classmethod
    def bad_splitting_ops(cls, why: str) -> "CommandError":
        return cls(f"splitting_ops: {why}")

    @classmethod
    def no_page(cls, path: str, why: str) -> "CommandError":
        return cls(
            f"--html {path}: no page can be written there: {why}.\n"
            "  Give the path of a file, such as page.html."
        )

    @classmethod
    def settings_are_fixed(cls, target: str) -> "CommandError":
        return cls(
            f"--set for a model that {target} has compiled already: its settings are fixed.\n"
            "  Give them where it is compiled, or return the model before that."
        )
