"""Reads prompts in the formats that people have them in. Errors name the file and the line."""

from kvtide.prompts.fields import check_temperature
from kvtide.prompts.lines import KEYS, parse_prompt, single_prompt
from kvtide.prompts.openai import BODY_KEYS, parse_batch_line
from kvtide.prompts.prompt import Message, Prompt
from kvtide.prompts.reader import read_prompts
from kvtide.prompts.settings import (
    LARGEST_NEW_TOKENS,
    LARGEST_SEED,
    MOST_LOGPROBS,
    MOST_SAMPLES,
)

__all__ = [
    "BODY_KEYS",
    "KEYS",
    "LARGEST_NEW_TOKENS",
    "LARGEST_SEED",
    "MOST_LOGPROBS",
    "MOST_SAMPLES",
    "Message",
    "Prompt",
    "check_temperature",
    "parse_batch_line",
    "parse_prompt",
    "read_prompts",
    "single_prompt",
]
