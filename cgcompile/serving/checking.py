"""What the constructors of this folder take, looked at before any of them changes anything."""

from collections.abc import Iterable, Mapping
from typing import Any

from cgcompile.errors import AgreementError
from cgcompile.serving.agreement import Agreement
from cgcompile.serving.dispatcher import CudagraphDispatcher
from cgcompile.settings import require_callable, require_items, require_kind


def check_manager(
    model: object,
    dispatcher: object,
    inputs: Iterable[Any],
    agreement: object,
    functions: Mapping[str, object],
) -> None:
    """Refuse arguments of a manager that are of another kind than it takes.

    Args:
        model: the model.
        dispatcher: of that name.
        inputs: of that name; an iterator is left as it is.
        agreement: of that name.
        functions: by their names; each may be None.

    Raises:
        ConfigError: names the argument.
        AgreementError: an agreement about another dispatcher.
    """
    where = "CudaGraphManager"
    require_callable("model", where, model)
    require_kind("dispatcher", where, dispatcher, CudagraphDispatcher)
    require_items("inputs", where, inputs)
    require_kind("agreement", where, agreement, Agreement, maybe=True)
    for name, function in functions.items():
        if function is not None:
            require_callable(name, where, function)
    if isinstance(agreement, Agreement) and agreement.dispatcher is not dispatcher:
        raise AgreementError.other_dispatcher()
