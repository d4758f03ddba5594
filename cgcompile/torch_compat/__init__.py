"""The only package that depends on the version of torch, and that reads private names of torch.

``presence.py`` lists the private names, with the versions of torch on which each was tried. The
rule: no other part of cgcompile imports a name of torch that starts with an underscore, or a module
that torch does not document. Other packages import these modules by name, so that each loads what
it needs: ``from cgcompile.torch_compat import torch_ops``.
"""
