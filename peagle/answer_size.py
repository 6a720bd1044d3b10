"""How large an answer may become: tokens, their log-probabilities and the prompt's, for every choice.

A request of one mebibyte can ask for gigabytes of answer, which the engine's front end, the replica and the ingress
would each hold. The figures are upper estimates in bytes of JSON. Pure; online and bulk share it.

A beam search holds more: vLLM's front end keeps every hypothesis that ends, with its prompt, until the last one has
ended. So its memory grows with the square of its tokens.
"""

import bisect
from dataclasses import dataclass

DEFAULT_MIB = 16
_TOKEN_BYTES = 16  # text of a token
_ID_BYTES = 8
_LOGPROB_BYTES = 128  # of one token at one place: its text, bytes, rank and figure
_KEPT_BYTES = 2  # of a token of a hypothesis: two references to it, where one step in eight ends each


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShape:
    """What an answer repeats for each token.

    Attributes:
        num_choices: of all prompts.
        prompt_tokens: those that come back, each as often as it comes.
        logprobs: log-probabilities at each place of a response; 0 for none.
        prompt_logprobs: and at each place of a prompt.
        with_ids: token ids come, too.
        beam_prompt_tokens: of a beam search, whose beams are the choices, the longest prompt; None where it is none.
    """

    num_choices: int = 1
    prompt_tokens: int = 0
    logprobs: int = 0
    prompt_logprobs: int = 0
    with_ids: bool = False
    beam_prompt_tokens: int | None = None

    def num_bytes(self, output_tokens: int) -> int:
        """The whole answer, where each choice has so many tokens."""
        of_one = self._place_bytes(self.logprobs)
        if self.beam_prompt_tokens is not None:
            of_one += (self.beam_prompt_tokens + output_tokens) * _KEPT_BYTES
        return self._prompt_bytes() + max(1, self.num_choices) * output_tokens * of_one

    def most_output_tokens(self, num_bytes: int) -> int:
        """Tokens of each choice that an answer of so many bytes has room for; below 1 there is none.

        >>> AnswerShape(num_choices=2, logprobs=1).most_output_tokens(2 * 10 * (16 + 128))
        10
        """
        return bisect.bisect_right(range(num_bytes), num_bytes, key=self.num_bytes) - 1

    def _prompt_bytes(self) -> int:
        return self.prompt_tokens * self._place_bytes(self.prompt_logprobs)

    def _place_bytes(self, logprobs: int) -> int:
        return _TOKEN_BYTES + logprobs * _LOGPROB_BYTES + (_ID_BYTES if self.with_ids else 0)
