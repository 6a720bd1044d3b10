// A word-by-word diff of two texts.

const MAX_WORDS = 3000; // in the differing part of a text; in a longer part, every word counts as different

/** Split a text into words, each with the space before it; joined, they are the text. */
export const words = (text) => text.match(/\s*\S+|\s+$/g) ?? [];

/**
 * Return both texts as pieces [text, differs], with the number of words that differ.
 *
 * Strips the common prefix and suffix first, then finds the longest common subsequence of the rest.
 */
export function compare(left, right) {
  const [a, b] = [words(left), words(right)];
  let head = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head++;
  let tail = 0;
  while (tail < Math.min(a.length, b.length) - head && a.at(-1 - tail) === b.at(-1 - tail)) tail++;
  const common = commonWords(a.slice(head, a.length - tail), b.slice(head, b.length - tail));
  return {
    isSame: left === right,
    firstDifference: head,
    left: marked(a, head, tail, common.left),
    right: marked(b, head, tail, common.right),
  };
}

function commonWords(a, b) {
  const inLeft = new Array(a.length).fill(false);
  const inRight = new Array(b.length).fill(false);
  if (a.length <= MAX_WORDS && b.length <= MAX_WORDS) {
    const lengths = commonLengths(a, b);
    const width = b.length + 1;
    for (let i = 0, j = 0; i < a.length && j < b.length; ) {
      if (a[i] === b[j]) inLeft[i++] = inRight[j++] = true;
      else if (lengths[(i + 1) * width + j] >= lengths[i * width + j + 1]) i++;
      else j++;
    }
  }
  return { left: inLeft, right: inRight };
}

/** Return a table whose entry (i, j) is the length of the longest common subsequence of a[i:] and b[j:]. */
function commonLengths(a, b) {
  const width = b.length + 1;
  const lengths = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      lengths[i * width + j] =
        a[i] === b[j]
          ? lengths[(i + 1) * width + j + 1] + 1
          : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
    }
  }
  return lengths;
}

function marked(all, head, tail, isCommon) {
  const pieces = [["", false]];
  const add = (text, differs) => {
    if (pieces.at(-1)[1] === differs) pieces.at(-1)[0] += text;
    else if (text) pieces.push([text, differs]);
  };
  let numDifferent = 0;
  all.forEach((word, index) => {
    const differs = index >= head && index < all.length - tail && !isCommon[index - head];
    const space = word.length - word.trimStart().length;
    add(word.slice(0, space), differs && pieces.at(-1)[1]);
    add(word.slice(space), differs);
    if (differs) numDifferent++;
  });
  return { pieces, numDifferent, numWords: all.length };
}
