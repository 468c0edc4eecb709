// Stands in for torch's header of this name: TORCH_CHECK throws what it is told.
#pragma once
#include <sstream>
#include <stdexcept>
template <typename... T>
[[noreturn]] void c10_fail(const T &...parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw std::runtime_error(text.str());
}
#define TORCH_CHECK(condition, ...)              \
    do {                                         \
        if (!(condition)) c10_fail(__VA_ARGS__); \
    } while (0)
