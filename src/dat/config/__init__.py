"""All settings of a run, the recipes, and the only place that turns settings into objects."""

from dat.config.schema import RunConfig, parse_edits

__all__ = ["RunConfig", "parse_edits"]
