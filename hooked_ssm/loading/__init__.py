"""Models from files and from other libraries, and back: `HookedModel` has these as methods."""

from hooked_ssm.loading.assemble import from_state_dict
from hooked_ssm.loading.hf import from_hf
from hooked_ssm.loading.native import save_pretrained
from hooked_ssm.loading.pretrained import from_pretrained

__all__ = ["from_hf", "from_pretrained", "from_state_dict", "save_pretrained"]
