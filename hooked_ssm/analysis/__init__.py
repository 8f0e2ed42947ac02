"""Analyses that run unchanged on every architecture: one file per method."""

from hooked_ssm.analysis.interchange import MechanisticEvaluation, mechanistic_evaluation, verdict
from hooked_ssm.analysis.sites import BLOCK_SITES, Site, find_site, find_sites

__all__ = [
    "BLOCK_SITES",
    "MechanisticEvaluation",
    "Site",
    "find_site",
    "find_sites",
    "mechanistic_evaluation",
    "verdict",
]
