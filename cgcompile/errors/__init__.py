"""Every error that cgcompile raises, with every message, in one tree.

A message says what was expected, what was found (argument path, node and user source line where
there is one) and what to do next. Messages are built here, by class methods, so that they are
reviewed together and each has a snapshot in ``tests/test_errors.py``. Arguments are plain strings
and numbers: these files import nothing of cgcompile and nothing of torch.
"""

from cgcompile.errors.commands import CommandError
from cgcompile.errors.compilation import (
    BoundaryError,
    CacheError,
    ConfigError,
    DescriptorError,
    ForwardContextError,
    PassError,
    PieceCompileError,
    SymbolError,
)
from cgcompile.errors.encoder import (
    EncoderBudgetError,
    EncoderBufferError,
    EncoderItemError,
    EncoderModelError,
    EncoderPackError,
    EncoderShardError,
)
from cgcompile.errors.root import CGCompileError, with_article
from cgcompile.errors.running import (
    AddressChangedError,
    CaptureBusyError,
    CaptureError,
    DispatchError,
    GradientError,
    GuardError,
    HostValueChangedError,
    WeightsError,
    missing_attribute,
    stale_result,
)
from cgcompile.errors.serving import (
    AgreementError,
    BatchError,
    InputBufferError,
    ManagerError,
    SizesError,
)
from cgcompile.errors.tracing import (
    ArgumentsError,
    RecompileError,
    TraceError,
)
