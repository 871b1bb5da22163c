// Open Domains of this process by id.
#pragma once

#include <cstdint>
#include <memory>

#include "ffi/cpu/domain.h"

namespace iser {

// Null once the Domain is closed.
std::shared_ptr<cpu::Domain> find_domain(uint32_t id);

// Why this process may not use the Domain, which a parent made that it was forked from; else empty.
std::string forked_text(const cpu::Domain& domain);

}  // namespace iser
