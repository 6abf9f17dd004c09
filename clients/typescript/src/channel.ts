/** Channel settings of proto/README.md, TLS, and the token of each call. */

import { readFileSync } from "node:fs";
import { ChannelCredentials, Metadata, credentials, type ClientOptions } from "@grpc/grpc-js";

/** A client's credentials; without any: plaintext without authentication. */
export interface Security {
  /** A bearer token, or a function that returns it for each call. */
  token?: string | (() => string);
  /** A file with a bearer token. It is read for each call, so a replaced token is used from the next call on. */
  tokenFile?: string;
  /** Whether to encrypt the connection. `true` trusts Node's own roots; give PEM files for anything else. */
  tls?: boolean | Tls;
}

/** PEM files of a connection. */
export interface Tls {
  /** Certificate authority that signed the server's certificate. */
  ca?: string;
  /** The client's own certificate, for mutual TLS; requires its key. */
  certificate?: string;
  key?: string;
  /** Name to expect in the server's certificate, if it differs from the address. */
  serverName?: string;
}

/** A client's credentials cannot be used. */
export class CredentialsUnusable extends Error {
  override name = "CredentialsUnusable";
}

const MAX_MESSAGE_BYTES = 64 * 1024 * 1024;
const IDEMPOTENT = {
  "penstock.v1.RolloutService": ["GetServerInfo", "GetTrajectory", "Abort"],
  "penstock.v1.TaskService": ["SubmitTasks", "RenewLease", "CompleteTrajectory"],
};

/** Options of a channel, as in `penstock.wire.channel`. */
export function channelOptions(security: Security): ClientOptions {
  const name = Object.entries(IDEMPOTENT).flatMap(([service, methods]) =>
    methods.map((method) => ({ service, method })),
  );
  const retryPolicy = {
    maxAttempts: 5,
    initialBackoff: "0.2s",
    maxBackoff: "5s",
    backoffMultiplier: 2,
    retryableStatusCodes: ["UNAVAILABLE"],
  };
  const tls = typeof security.tls === "object" ? security.tls : {};
  return {
    "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
    "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 5_000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.initial_reconnect_backoff_ms": 200,
    "grpc.max_reconnect_backoff_ms": 2_000,
    "grpc.service_config": JSON.stringify({ methodConfig: [{ name, retryPolicy }] }),
    ...(tls.serverName ? { "grpc.ssl_target_name_override": tls.serverName } : {}),
    // With a proxy from the environment, the token would leave this host.
    ...(security.tls ? {} : { "grpc.enable_http_proxy": 0 }),
  };
}

/** Credentials of a channel to `address`. Throws CredentialsUnusable. */
export function channelCredentials(address: string, security: Security): ChannelCredentials {
  const tls = security.tls;
  if (!tls) {
    if ((security.token || security.tokenFile) && !isLoopback(address)) {
      throw new CredentialsUnusable(
        `a token is not sent in plaintext to ${address}: give \`tls\`, or use an address of this ` +
          "host's loopback",
      );
    }
    return credentials.createInsecure();
  }
  const { ca, certificate, key } = typeof tls === "object" ? tls : ({} as Tls);
  if (!certificate !== !key) {
    throw new CredentialsUnusable("a client's certificate and its key are given together");
  }
  return credentials.createSsl(read(ca), read(key), read(certificate));
}

/** The metadata of one call. Throws CredentialsUnusable until a token has been read. */
export class TokenSource {
  private last = "";

  constructor(private readonly security: Security) {}

  metadata(): Metadata {
    const metadata = new Metadata();
    const token = this.token();
    if (token) metadata.set("authorization", `Bearer ${token}`);
    return metadata;
  }

  private token(): string {
    const { token, tokenFile } = this.security;
    if (tokenFile === undefined) {
      return token ? checked(typeof token === "function" ? token() : token, "the token") : "";
    }
    try {
      this.last = checked(readFileSync(tokenFile, "ascii").trim(), tokenFile);
    } catch (error) {
      // The file may be in the middle of a replacement; use the last token read.
      if (!this.last) throw unusable(tokenFile, error);
    }
    return this.last;
  }
}

function isLoopback(address: string): boolean {
  const host = address.slice(0, address.lastIndexOf(":")).replace(/^\[|\]$/g, "");
  return host === "localhost" || host === "::1" || /^127(\.\d{1,3}){3}$/.test(host);
}

function read(path: string | undefined): Buffer | null {
  try {
    return path === undefined ? null : readFileSync(path);
  } catch (error) {
    throw unusable(path ?? "", error);
  }
}

function checked(token: string, what: string): string {
  if (!/^[!-~]+$/.test(token)) throw new CredentialsUnusable(`${what}: it does not hold a token`);
  return token;
}

function unusable(path: string, error: unknown): CredentialsUnusable {
  if (error instanceof CredentialsUnusable) return error;
  // The error itself is left out: it may quote the file's content.
  return new CredentialsUnusable(`${path}: ${(error as NodeJS.ErrnoException).code ?? "unreadable"}`);
}
