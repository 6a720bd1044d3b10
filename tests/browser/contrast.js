// Returns every visible text with the WCAG contrast between its colour and the colour behind it.
(() => {
  const channels = (colour) => colour.match(/[\d.]+/g).map(Number);
  const linear = (value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const backgroundOf = (node) => {
    for (let element = node; element; element = element.parentElement) {
      const colour = channels(getComputedStyle(element).backgroundColor);
      if (colour[3] !== 0) return colour;
    }
    return [255, 255, 255];
  };
  const contrasts = [];
  for (const node of document.querySelectorAll("body *")) {
    const hasText = [...node.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.textContent.trim());
    if (!hasText || !node.checkVisibility() || node.closest(".unseen, option, noscript, [disabled]")) continue;
    const [text, background] = [luminance(channels(getComputedStyle(node).color)), luminance(backgroundOf(node))];
    const contrast = (Math.max(text, background) + 0.05) / (Math.min(text, background) + 0.05);
    contrasts.push({ text: node.textContent.slice(0, 40), contrast });
  }
  return contrasts;
})();
