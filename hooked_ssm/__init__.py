"""A TransformerLens-style interpretability toolkit for every sequence architecture."""

# First, since what is imported below brings tqdm along.
import hooked_ssm.progress  # noqa: F401

# isort: split
from hooked_ssm.cache import HookedCache
from hooked_ssm.config import ModelConfig
from hooked_ssm.mixers import register_mixer
from hooked_ssm.model import HookedModel, Past

__all__ = ["HookedCache", "HookedModel", "ModelConfig", "Past", "register_mixer"]
