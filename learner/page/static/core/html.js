// The markup of every component: htm bound to Preact, and the hooks and signals that components use.
// Text goes in as children or attributes only; nothing in this page sets innerHTML.
import { Component, createElement, Fragment, render } from "../vendor/preact.js";
import htm from "../vendor/htm.js";

export const html = htm.bind(createElement);

const isSame = (a, b) => Object.keys(a).length === Object.keys(b).length && Object.keys(a).every((name) => a[name] === b[name]);

// A component that is drawn again only when one of its properties is another: rows of a list, of which few change at a time. It
// keeps no state and reads no signal.
export function memo(draw) {
  return class extends Component {
    shouldComponentUpdate(next) {
      return !isSame(next, this.props);
    }

    render(props) {
      return draw(props);
    }
  };
}

export { Component, Fragment, render };
export { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../vendor/hooks.js";
export { batch, computed, effect, signal, useComputed, useSignal, useSignalEffect } from "../vendor/signals.js";
