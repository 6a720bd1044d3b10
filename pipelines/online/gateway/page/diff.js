// Where two texts differ, word by word.

const MOST_WORDS = 3000; // in the part that differs, of each text; beyond it the whole part counts as different

/** Words with the space before each; joined they are the text. */
export const words = (text) => text.match(/\s*\S+|\s+$/g) ?? [];

/**
 * Both texts as pieces [text, differs], in order; and how many words of each the other has not.
 *
 * What is equal at the beginning and the end is set aside first; the longest common sequence decides the rest.
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
  if (a.length <= MOST_WORDS && b.length <= MOST_WORDS) {
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

/** Entry (i, j): the length of the longest common sequence of a from i and b from j. */
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
