// A bar of a share, with its value in words for who cannot see it.
import { html } from "../../core/html.js";
import { share } from "../../core/format.js";

export function Meter({ value, label }) {
  const filled = Math.max(0, Math.min(1, value ?? 0));
  return html`<span class="meter" role="meter" aria-label=${label} aria-valuemin="0" aria-valuemax="1" aria-valuenow=${filled} aria-valuetext=${share(value)}>
    <span class="meter-fill" style=${{ width: `${filled * 100}%` }}></span></span>`;
}
