// An element of the fusion graphs or the sources. Text is a run's own and reaches the page through textContent alone.
"use strict";
xlafuse.make = (tag, className, text, attributes = {}) => {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
};
