"""All architectures of the zoo, by name."""

from model_zoo.entries import Entry
from model_zoo.features import FEATURES
from model_zoo.language import DECODERS, ENCODERS, TRANSLATORS
from model_zoo.perception import FORECASTING, HEARING, SEEING, TOGETHER

ENTRIES: tuple[Entry, ...] = (
    *DECODERS,
    *ENCODERS,
    *TRANSLATORS,
    *SEEING,
    *HEARING,
    *TOGETHER,
    *FORECASTING,
    *FEATURES,
)
CATALOGUE = {entry.name: entry for entry in ENTRIES}
