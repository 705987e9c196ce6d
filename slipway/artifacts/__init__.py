"""The files that one part writes and another reads: bundle, certificate, engine manifest, golden rows."""
