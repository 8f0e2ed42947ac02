"""Results and tensors as plotly figures or HTML: returned, never shown, no global template.

Not imported by `import hooked_ssm`: plotly is paid for on use. circuitsvis is never imported, its
bundled script is read.
"""

from hooked_ssm.errors import MissingDependencyError
from hooked_ssm.plots.attention_heads import attention_heads
from hooked_ssm.plots.heatmap import heatmap
from hooked_ssm.plots.html import HtmlFigure
from hooked_ssm.plots.mechanism import attribution_bars, mechanism_scatter
from hooked_ssm.plots.patching import patching_heatmap
from hooked_ssm.plots.pattern import pattern
from hooked_ssm.plots.report import Section, report_page
from hooked_ssm.plots.save import save
from hooked_ssm.plots.scores import loss_by_position, score_bars
from hooked_ssm.plots.sites import site_restoration
from hooked_ssm.plots.sweep import (
    accuracy_by_variant,
    accuracy_by_width,
    attribution_boxes,
    dev_against_test,
)
from hooked_ssm.plots.tensors import to_numpy
from hooked_ssm.plots.training import accuracy_curve, loss_curve

__all__ = [
    "HtmlFigure",
    "MissingDependencyError",
    "Section",
    "accuracy_by_variant",
    "accuracy_by_width",
    "accuracy_curve",
    "attention_heads",
    "attribution_bars",
    "attribution_boxes",
    "dev_against_test",
    "heatmap",
    "loss_by_position",
    "loss_curve",
    "mechanism_scatter",
    "patching_heatmap",
    "pattern",
    "report_page",
    "save",
    "score_bars",
    "site_restoration",
    "to_numpy",
]
