// A view that cannot be drawn says so in its place; the head and the other views stay.
import { Component, html } from "../core/html.js";
import { Notice } from "./notice.js";

export class Boundary extends Component {
  componentDidCatch(problem) {
    console.error(problem);
    this.setState({ problem });
  }

  render({ children }, { problem }) {
    if (!problem) return children;
    return html`<${Notice} tone="bad">This view cannot be drawn: ${problem.message}. Another view, or the page again, may help.<//>`;
  }
}
