"""The only package that depends on the version of torch, and that reads private names of torch.

``presence.py`` lists the private names, with the versions of torch on which each was tried. The
rule: no other part of cgcompile imports a name of torch that starts with an underscore, or a module
that torch does not document. Callers write ``compat.name``, whichever file here defines it.
"""

# ruff: noqa: F403
from cgcompile.torch_compat.artifacts import *
from cgcompile.torch_compat.capture import *
from cgcompile.torch_compat.checkpoints import *
from cgcompile.torch_compat.compilers import *
from cgcompile.torch_compat.dynamo import *
from cgcompile.torch_compat.expressions import *
from cgcompile.torch_compat.foreign import *
from cgcompile.torch_compat.host_reads import *
from cgcompile.torch_compat.inductor_call import *
from cgcompile.torch_compat.ops import *
from cgcompile.torch_compat.presence import *
from cgcompile.torch_compat.regions import *
from cgcompile.torch_compat.shapes import *
from cgcompile.torch_compat.structured_trace import *
from cgcompile.torch_compat.subclasses import *
from cgcompile.torch_compat.torch_settings import *
from cgcompile.torch_compat.tracing import *
