// Marks what the shared library shows to its users; everything else stays hidden.
#pragma once

#define QKV_EXPORT __attribute__((visibility("default")))
