// BullMQ on Redis, as `peers.run_client` runs it: KIND CONNECTIONS CALLS ADDRESS.
// A round trip is a job that is added, taken and completed by a worker that is driven by hand.

import { createRequire } from "node:module";

const require = createRequire(`${process.cwd()}/`);
const { Queue, Worker } = require("bullmq");

const payload = { data: "x".repeat(256) };
const [kind, connections, calls, address] = process.argv.slice(2);
const [host, port] = address.split(":");
const connection = { host, port: Number(port), maxRetriesPerRequest: null };
const lanes = Number(connections);
const share = Math.floor(Number(calls) / lanes);
const name = kind === "round trip" ? "trip" : "bench";
const queues = Array.from({ length: lanes }, () => new Queue(name, { connection }));
await Promise.all(queues.map((queue) => queue.waitUntilReady()));

if (kind === "count") {
  console.log(JSON.stringify({ ready: await queues[0].getWaitingCount() }));
} else {
  const seconds = [];
  const enqueue = async (queue) => {
    for (let number = 0; number < share; number++) await queue.add("bench", payload);
  };
  const trip = async (queue, place) => {
    const worker = new Worker(name, null, { connection, autorun: false });
    await worker.waitUntilReady();
    for (let number = 0; number < share; number++) {
      const began = performance.now();
      await queue.add("trip", payload, { removeOnComplete: true });
      const job = await worker.getNextJob(`lane-${place}`);
      await job.moveToCompleted("done", `lane-${place}`, false);
      seconds.push((performance.now() - began) / 1000);
    }
    await worker.close();
  };
  const began = performance.now();
  await Promise.all(queues.map(kind === "enqueue" ? enqueue : trip));
  console.log(JSON.stringify({ rate: (share * lanes * 1000) / (performance.now() - began), seconds }));
}
await Promise.all(queues.map((queue) => queue.close()));
process.exit(0);
