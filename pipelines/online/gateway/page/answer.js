// Receives one streamed answer: its text, and metrics as measured in the browser. Does not render anything.

import { streamChat } from "./api.js";

/**
 * Send a chat; call `onChange(answer)` for each event, and return the complete answer.
 *
 * `total_s` and `ttft_s` are measured in this browser, from sending the request to the last and the first token.
 * tokens/s is output tokens / `total_s`, including the time to the first token. Token counts, acceptance and cost come
 * from the endpoint.
 */
export async function receive(body, signal, onChange) {
  const startedAt = performance.now();
  const answer = {
    text: "",
    thought: "",
    ttft_s: null,
    total_s: 0,
    numTokens: 0,
    tokens_per_s: null,
    acceptanceLength: null,
    usd: null,
    finishReason: null,
  };
  for await (const event of streamChat(body, signal)) {
    read(event, answer, (performance.now() - startedAt) / 1000);
    onChange(answer);
  }
  return answer;
}

function read(event, answer, elapsed_s) {
  const choice = event.choices?.[0];
  const text = choice?.delta?.content ?? "";
  const thought = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
  answer.text += text;
  answer.thought += thought;
  answer.finishReason = choice?.finish_reason ?? answer.finishReason;
  answer.numTokens = event.usage?.completion_tokens ?? answer.numTokens;
  if (text || thought) {
    answer.ttft_s ??= elapsed_s;
    answer.total_s = elapsed_s;
  }
  answer.tokens_per_s = answer.total_s ? answer.numTokens / answer.total_s : null;
  if (event.peagle) {
    answer.usd = event.peagle.usd;
    answer.acceptanceLength = event.peagle.acceptance_length;
  }
}
