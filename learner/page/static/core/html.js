// The markup of every component: htm bound to Preact, and the hooks and signals that components use.
// Text goes in as children or attributes only; nothing in this page sets innerHTML.
import { Component, createElement, Fragment, render } from "../vendor/preact.js";
import htm from "../vendor/htm.js";

export const html = htm.bind(createElement);
export { Component, Fragment, render };
export { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../vendor/hooks.js";
export { batch, computed, effect, signal, useComputed, useSignal, useSignalEffect } from "../vendor/signals.js";
