// Make an element. Text comes from the run, so it is set only as textContent.
"use strict";
xlafuse.make = (tag, className, text, attributes = {}) => {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
};
