"""Reads prompts in the formats that people and clients have them in. Errors name the place."""

from kvtide.prompts.fields import FieldError, check_temperature, parse_object
from kvtide.prompts.lines import KEYS, parse_prompt, single_prompt
from kvtide.prompts.openai import BODY_KEYS, parse_batch_line, read_body
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
    "FieldError",
    "Message",
    "Prompt",
    "check_temperature",
    "parse_batch_line",
    "parse_object",
    "parse_prompt",
    "read_body",
    "read_prompts",
    "single_prompt",
]
