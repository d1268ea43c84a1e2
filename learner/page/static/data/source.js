// Where the page's data come from: an exported file embeds them, else the server has them.
import { serverSource } from "./server_source.js";
import { snapshotSource } from "./snapshot_source.js";

const embedded = document.getElementById("snapshot");

export const source = embedded ? snapshotSource(JSON.parse(embedded.textContent)) : serverSource;
