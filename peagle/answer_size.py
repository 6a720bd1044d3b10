"""How large an answer may become: tokens, their log-probabilities and the prompt's, for every choice.

A request of one mebibyte can ask for gigabytes of answer, which the engine's front end, the replica and the ingress
would each hold. The figures are upper estimates in bytes of JSON. Pure; online and bulk share it.
"""

from dataclasses import dataclass

DEFAULT_MIB = 16
_TOKEN_BYTES = 16  # text of a token
_ID_BYTES = 8
_LOGPROB_BYTES = 128  # of one token at one place: its text, bytes, rank and figure


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShape:
    """What an answer repeats for each token.

    Attributes:
        num_choices: of all prompts.
        prompt_tokens: those that come back, each as often as it comes.
        logprobs: log-probabilities at each place of a response; 0 for none.
        prompt_logprobs: and at each place of a prompt.
        with_ids: token ids come, too.
    """

    num_choices: int = 1
    prompt_tokens: int = 0
    logprobs: int = 0
    prompt_logprobs: int = 0
    with_ids: bool = False

    def num_bytes(self, output_tokens: int) -> int:
        """The whole answer, where each choice has so many tokens."""
        return self._prompt_bytes() + self.num_choices * output_tokens * self._place_bytes(self.logprobs)

    def most_output_tokens(self, num_bytes: int) -> int:
        """Tokens of each choice that an answer of so many bytes has room for; below 1 there is none.

        >>> AnswerShape(num_choices=2, logprobs=1).most_output_tokens(2 * 10 * (16 + 128))
        10
        """
        return (num_bytes - self._prompt_bytes()) // (max(1, self.num_choices) * self._place_bytes(self.logprobs))

    def _prompt_bytes(self) -> int:
        return self.prompt_tokens * self._place_bytes(self.prompt_logprobs)

    def _place_bytes(self, logprobs: int) -> int:
        return _TOKEN_BYTES + logprobs * _LOGPROB_BYTES + (_ID_BYTES if self.with_ids else 0)
