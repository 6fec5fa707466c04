"""Prompts for models that judge: texts with names in braces. Other braces, as in LaTeX or JSON, stay as they are."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from xrl_lite.errors import ConfigError, did_you_mean

_NAME = re.compile(r"\{([a-z_]+)\}")


def fill(template: str, values: Mapping[str, str]) -> str:
    """Put values in the place of their names, once: what looks like a name inside of a value stays."""
    return _NAME.sub(lambda match: values.get(match[1], match[0]), template)


def check_template(template: str, *, known: Collection[str], needed: Sequence[str]) -> str:
    """Return the template.

    Raises:
        ConfigError: a name is missing; names the closest that is there.
    """
    there = _NAME.findall(template)
    for name in needed:
        if name not in there:
            raise ConfigError(
                f"must contain {{{name}}}.{did_you_mean(name, there)} Known names: "
                f"{', '.join(f'{{{name}}}' for name in known)}."
            )
    return template
