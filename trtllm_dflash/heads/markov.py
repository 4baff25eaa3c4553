"""DSpark: shifted rows, a Markov bias from the previous draft, and a confidence head.

``block_size`` counts drafts, and row j predicts the token at N + 1 + j, unless ``sample_from_anchor`` is false.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..config import ConfidenceConfig, MarkovConfig
from .markov_walk import draft
from .rows import DraftHead, Facts, Field, row
from .values import Values, boolean, number, rank, text

_GATED_PARAMETERS = {"vanilla": "", "gated": " + r*H + r*r + r", "rnn": " + 3*r*2*r + 3*r*H + 3*r"}


def _spellings(*keys: str) -> tuple[str, ...]:
    """TensorRT-LLM's four places of a DSpark key; they must agree, so their order carries no meaning."""
    return tuple(f"{place}{key}" for key in keys for place in ("dflash_config.", "dspark_config.", "dspark_", ""))


def _block(values: Values) -> tuple[int, int]:
    """(max_draft_len, first_draft_row).

    Without ``sample_from_anchor`` the sources disagree on what ``block_size`` counts: drafts (SGLang, Edge-LLM) or
    rows (speculators). The proposal length settles it; nothing else does.
    """
    size, proposal = values["block_size"], values["num_speculative_tokens"]
    if values["sample_from_anchor"] is not False:
        return size, 0
    if proposal not in (size, size - 1):
        raise ValueError(
            f"sample_from_anchor is false and block_size is {size}: num_speculative_tokens must tell whether the "
            f"block has {size} drafts or {size - 1}, but it is {proposal}"
        )
    return proposal, 1


def _confidence_by_tensors(values: Values) -> bool:
    """Without a flag: SpecForge's rule when its loss weight is recorded, else what the file holds."""
    alpha = values["confidence_alpha"]
    return alpha > 0 if alpha is not None else _confidence_width(values) is not None


def _confidence_width(values: Values) -> int | None:
    names = ("confidence_head.proj.weight", "confidence_proj.weight")
    found = [values["tensors"][name][-1] for name in names if values["tensors"].get(name)]
    return found[0] if found else None


def _with_markov_by_width(values: Values) -> bool:
    """The defaults of SpecForge and speculators differ; the width of the weight does not."""
    width = _confidence_width(values)
    return width is not None and width != values["hidden_size"]


def _confidence_needs_rank(values: Values) -> Iterator[str]:
    if values["confidence"] and values["confidence_with_markov"] and values["markov_rank"] == 0:
        yield (
            "confidence_head_with_markov is true but markov_rank is 0: there is no Markov embedding to concatenate; "
            "set it to false or give the rank"
        )


def _has_markov(facts: Facts) -> bool:
    return bool(facts["markov_rank"])


def _confidence_input(facts: Facts) -> bool | None:
    """Whether the head sees the Markov embedding; None without a confidence head."""
    return facts["confidence_with_markov"] if facts["confidence"] else None


def _parts(values: Values) -> dict[str, Any]:
    rank_, with_markov = values["markov_rank"], values["confidence_with_markov"]
    return {
        "markov": MarkovConfig(rank_, values["markov_kind"]) if rank_ else None,
        "confidence": ConfidenceConfig(with_markov) if values["confidence"] else None,
    }


def _parameters(facts: Facts) -> str:
    markov = "V*r + Vd*r" + _GATED_PARAMETERS[facts["markov_kind"]] if _has_markov(facts) else "0"
    width = {None: "0", False: "H + 1", True: "H + r + 1"}[_confidence_input(facts)]
    return f"{markov} + {width}"


def _markov_names(name: str) -> tuple[str, str]:
    """SpecForge's nested name and ModelOpt's flat one."""
    return f"markov_head.{name}", name


MARKOV = DraftHead(
    family="dspark",
    architectures=("DSparkDraftModel", "Qwen3DSparkModel", "DSparkSpeculator", "Gemma4DSparkModel", "K3DSparkModel",
                   "DSparkMiniMaxDraftModel"),
    default_block_size=7,
    block=_block,
    draft=draft,
    tables=("markov_w1", "markov_w2", "markov_gate", "markov_gate_bias", "markov_joint", "markov_joint_bias",
            "confidence", "confidence_bias"),
    witness={
        "projector_type": lambda value: value == "dspark",
        "markov_rank": lambda value: value != 0,
        "shift_label": lambda value: value is True,
        "enable_confidence_head": lambda value: value is True,
        "use_confidence_head": lambda value: value is True,
        "speculators_model_type": lambda value: value == "dspark",
    },
    fields=(
        Field("markov_rank", rank(0), _spellings("markov_rank"), default=0),
        Field("markov_kind", text("vanilla", "gated", "rnn"), _spellings("markov_head_type"), default="vanilla"),
        Field("confidence_alpha", number(0, exclusive=False), _spellings("confidence_head_alpha"), default=None),
        Field("confidence", boolean, _spellings("enable_confidence_head", "use_confidence_head"),
              default=_confidence_by_tensors),
        Field("confidence_with_markov", boolean, _spellings("confidence_head_with_markov"),
              default=_with_markov_by_width),
    ),
    tensors=(
        row("markov_w1", "V r", *_markov_names("markov_w1.weight"), when=_has_markov),
        row("markov_w2", "Vd r", *_markov_names("markov_w2.weight"), when=_has_markov),
        row("markov_gate", "r H+r", *_markov_names("gate_proj.weight"),
            when=lambda facts: _has_markov(facts) and facts["markov_kind"] == "gated"),
        row("markov_gate_bias", "r", *_markov_names("gate_proj.bias"),
            when=lambda facts: _has_markov(facts) and facts["markov_kind"] == "gated"),
        row("markov_joint", "3*r 2*r+H", *_markov_names("joint_proj.weight"),
            when=lambda facts: _has_markov(facts) and facts["markov_kind"] == "rnn"),
        row("markov_joint_bias", "3*r", *_markov_names("joint_proj.bias"),
            when=lambda facts: _has_markov(facts) and facts["markov_kind"] == "rnn"),
        row("confidence", "1 H", "confidence_head.proj.weight", "confidence_proj.weight",
            when=lambda facts: _confidence_input(facts) is False),
        row("confidence", "1 H+r", "confidence_head.proj.weight", "confidence_proj.weight",
            when=lambda facts: _confidence_input(facts) is True),
        row("confidence_bias", "1", "confidence_head.proj.bias", "confidence_proj.bias",
            when=lambda facts: _confidence_input(facts) is not None),
    ),
    letters={"r": "markov_rank"},
    rules=(_confidence_needs_rank,),
    parts=_parts,
    parameters=_parameters,
)  # fmt: skip
