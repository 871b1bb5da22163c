// What an error word says, and what to do about it. For the host.
#pragma once

#include <string>

#include "ffi/core/layout.h"
#include "ffi/core/protocol.h"

namespace iser {

// Empty where there is no error. `has_startup_limit`: the first call's limit is one of its own.
inline std::string error_text(const ErrorWord& e, bool has_startup_limit) {
  const auto number = [](auto value) { return std::to_string(value); };
  const std::string where = e.layer < 0 ? ""
                                        : " in layer " + number(e.layer) + ", stage " +
                                              stage_name(static_cast<Stage>(e.stage)) +
                                              ", generation " + number(e.generation);
  const std::string rank = "IserError: rank " + number(e.rank);
  switch (static_cast<ErrorCode>(e.code)) {
    case ErrorCode::kNone:
      return "";
    case ErrorCode::kTimeout:
      if (e.peer == e.rank && static_cast<Stage>(e.stage) == Stage::kCombine) {
        return rank + " waited " + number(e.expected) + " ms for the call before this one to end" +
               where +
               "; it lost its fused_moe, or the two calls stand side by side in a program: let one "
               "take what the other gives, or use a Domain for each";
      }
      return rank + " waited " + number(e.expected) + " ms for " +
             (e.peer < 0 ? std::string("its routes") : "rank " + number(e.peer)) + where +
             "; a rank is late, stuck or in another program: look there, or raise " +
             (e.found == 1 && has_startup_limit ? "startup_timeout_s" : "timeout_s");
    case ErrorCode::kPeerDied:
      return rank + " lost the process of rank " + number(e.peer) + where +
             "; close this Domain and make a new one with the processes that are left";
    case ErrorCode::kCallMismatch:
      return rank + " is in layer " + number(static_cast<int64_t>(e.expected)) + ", but rank " +
             number(e.peer) + " is in layer " + number(static_cast<int64_t>(e.found)) +
             " or brings other sizes or options" + where +
             "; all ranks of a Domain must make the same calls in the same order: give each "
             "program a Domain of its own";
    case ErrorCode::kPlanMismatch:
      return rank + " has plan hash " + number(e.expected) + ", but rank " + number(e.peer) +
             " has " + number(e.found) + where +
             "; all ranks need the same options and the same version of jax_iser";
    case ErrorCode::kClosed:
      if (e.peer >= 0 && e.peer != e.rank) {
        return rank + " is in a call that rank " + number(e.peer) +
               " does not make, because its process is closing the Domain" + where +
               "; all ranks must make the same calls before the first of them leaves the Domain's "
               "context";
      }
      return rank + " was in a call when the Domain was closed" + where +
             "; block until results are ready before leaving the Domain's context";
    case ErrorCode::kBadFusedMoe:
      return rank + " got a fused_moe with other tokens or weights than its start" + where +
             "; pass the same arrays to both, and make a new Domain";
    case ErrorCode::kBadHandle:
      return rank + " got a call for a Domain that is not open, or of other sizes" + where +
             "; pass the handle of an open Domain as an argument of the program";
    case ErrorCode::kBadLayer:
      return rank + " got layer " + number(static_cast<int64_t>(e.found)) + ", outside the " +
             number(e.expected) + " layers of the Domain or of the stacked weights" + where +
             "; make the Domain with a larger num_layers, or stack the weights of all layers";
    case ErrorCode::kOverlap:
      return rank + " began a call before the one before it had ended" + where +
             "; it lost its fused_moe, or the two calls stand side by side in a program: let one "
             "take what the other gives, or use a Domain for each";
    case ErrorCode::kCorrupt:
      return rank + " found a guard word behind section " +
             section_name(static_cast<Section>(e.expected)) +
             " overwritten; memory of this Domain can't be trusted: please report this";
  }
  return rank + " failed with unknown code " + number(e.code) + where;
}

}  // namespace iser
