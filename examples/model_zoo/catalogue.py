"""All architectures of the zoo, features of torch, and other libraries, by name."""

from model_zoo.entries import Entry
from model_zoo.features import FEATURES
from model_zoo.language import DECODERS, ENCODERS, TRANSLATORS
from model_zoo.libraries import OTHERS
from model_zoo.perception import FORECASTING, HEARING, SEEING, TOGETHER

ENTRIES: tuple[Entry, ...] = (
    *DECODERS,
    *ENCODERS,
    *TRANSLATORS,
    *SEEING,
    *HEARING,
    *TOGETHER,
    *FORECASTING,
)
LIBRARIES: tuple[Entry, ...] = (*FEATURES, *OTHERS)
PARTS = {"architectures": ENTRIES, "libraries": LIBRARIES}
CATALOGUE = {entry.name: entry for part in PARTS.values() for entry in part}
