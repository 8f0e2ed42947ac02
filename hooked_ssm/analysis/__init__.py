"""Analyses that run unchanged on every architecture: one file per method."""

from hooked_ssm.analysis import ablation, metrics
from hooked_ssm.analysis.attribution import agreement, attribution_patching
from hooked_ssm.analysis.circuits import Circuit, EdgeAttribution, edge_attribution
from hooked_ssm.analysis.detection import chance_scores, detection_pattern, pattern_scores
from hooked_ssm.analysis.graph import Edge, Node
from hooked_ssm.analysis.in_context import (
    LossCurve,
    in_context_learning_score,
    loss_per_position,
)
from hooked_ssm.analysis.induction import (
    DetectionScores,
    detection_scores,
    duplicate_token_scores,
    induction_scores,
    previous_token_scores,
)
from hooked_ssm.analysis.interchange import MechanisticEvaluation, mechanistic_evaluation, verdict
from hooked_ssm.analysis.logit_attribution import (
    LogitAttribution,
    logit_attribution,
    logit_lens,
)
from hooked_ssm.analysis.mechanism_report import MechanismReport, mechanism_report
from hooked_ssm.analysis.mixer_contract import check_mixer
from hooked_ssm.analysis.patching import activation_patching
from hooked_ssm.analysis.patching_result import ActivationPatching
from hooked_ssm.analysis.path_patching import PathPatching, path_patching
from hooked_ssm.analysis.probing import ProbeResults, linear_probes
from hooked_ssm.analysis.sites import BLOCK_SITES, Site, find_site, find_sites
from hooked_ssm.analysis.token_mixing import TokenMixing, token_mixing

__all__ = [
    "ActivationPatching",
    "BLOCK_SITES",
    "Circuit",
    "DetectionScores",
    "Edge",
    "EdgeAttribution",
    "LogitAttribution",
    "LossCurve",
    "MechanismReport",
    "MechanisticEvaluation",
    "Node",
    "PathPatching",
    "ProbeResults",
    "Site",
    "TokenMixing",
    "ablation",
    "activation_patching",
    "agreement",
    "attribution_patching",
    "chance_scores",
    "check_mixer",
    "detection_pattern",
    "detection_scores",
    "duplicate_token_scores",
    "edge_attribution",
    "find_site",
    "find_sites",
    "in_context_learning_score",
    "induction_scores",
    "linear_probes",
    "logit_attribution",
    "logit_lens",
    "loss_per_position",
    "mechanism_report",
    "mechanistic_evaluation",
    "metrics",
    "path_patching",
    "pattern_scores",
    "previous_token_scores",
    "token_mixing",
    "verdict",
]
