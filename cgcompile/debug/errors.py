"""Errors of the command line, with their messages. See ``cgcompile.errors``."""

from cgcompile.errors import CGCompileError, Template


class CommandError(CGCompileError, ValueError):
    """Words of the command line, its cache commands included, that cannot be carried out."""

    removed = Template("""
        there is no command {command!r} any more.
        Use 'cgcompile {instead}'.""")
    target_form = Template("""
        {target!r} is no target; expected module:function or path/to/file.py:function.
        The function takes nothing and returns a model and its inputs: (model, args).""")
    no_module = Template("""
        cannot import {name!r}: {why}.
        Give a module that Python finds here, or the path of a file: path/to/file.py:function.""")
    no_function = Template("""
        {module} has no function {name!r}.{known:close {name}}
        Functions: {known:list}.""")
    takes_arguments = Template("""
        {target} takes arguments, {signature}; expected a function that takes nothing.
        Let it make the model and inputs: def make(): return Model(), (torch.randn(8, 16),)""")
    bad_result = Template("""
        {target} returned {found}; expected a model and its inputs.
        Return (model, args), (model, args, kwargs) or a dict of them; args is a tuple, \
        or one tensor.""")
    no_inputs = Template("""
        {target} returned a model without inputs, and {command} calls it.
        Return (model, args) or (model, args, kwargs).""")
    bad_setting = Template("--set {given}: expected key=value, such as --set compiler=eager.")
    bad_splitting_ops = Template("splitting_ops: {why}")
    no_page = Template("""
        --html {path}: no page can be written there: {why}.
        Give the path of a file, such as page.html.""")
    settings_are_fixed = Template("""
        --set for a model that {target} has compiled already: its settings are fixed.
        Give them where it is compiled, or return the model before that.""")
    unknown_entry = Template("""
        no entry of {folder} has a key that starts with {prefix!r}.
        'cgcompile cache list' shows what is there; --dir names another folder.""")
    ambiguous_entry = Template("""
        {keys:count} entries have a key that starts with {prefix!r}: {keys:list}.
        Give more of the key.""")
    caching_is_off = Template("""
        cache_dir is 'off': there is no cache folder to look at.
        Name one with --dir, or unset CGCOMPILE_CACHE_DIR.""")
